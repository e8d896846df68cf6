"""Leases of this machine's GPUs and cores, between all processes of a user that launch runs.

A slot is a file that its holder has locked, so the kernel frees it when the holder dies for any reason. A job may
outlive its launcher by seconds: a slot in which a process is recorded is not free before that process is gone, too.

Requests are served first come, first served; a request that cannot be met waits in a queue and keeps its place by
asking again, at least every `FORGET_AFTER_S`. Until it is met, no later request takes slots that it could use, so a
stream of small runs cannot starve a large one.

The files are in a folder of this user and this boot: XDG_RUNTIME_DIR, or a folder in the system's temporary folder if
that is not set. Other users, other containers, and processes with another such folder are not taken into account.
Cores are counted, not pinned.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import LaunchError
from workbench.launch.devices import gpu_uuid
from workbench.records.directory import process_alive, this_process

FORGET_AFTER_S = 5.0
"""A request that was not repeated for this long loses its place in the queue."""


@dataclass
class Lease:
    """Slots of this process until they are released, or it ends.

    Attributes:
        ids: of the devices, in the order in which they were offered.
    """

    ids: tuple[str, ...]
    _files: list[int] = field(repr=False)

    def note(self, pid: int, create_time: float) -> None:
        """Record the process that uses the slots: they stay taken while it lives, even after this process.

        Args:
            pid: of the process that starts the ranks.
            create_time: psutil's, in seconds.
        """
        for file in self._files:
            _write(file, {"pid": pid, "create_time": create_time})

    def release(self) -> None:
        """Free the slots, whichever process is recorded; nothing if that was done."""
        while self._files:
            file = self._files.pop()
            _write(file, {})
            fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that inherited the file
            os.close(file)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def take(kind: str, count: int, of: Sequence[str], *, requester: str = "") -> Lease | None:
    """Take free slots at once, or none at all.

    Args:
        kind: "gpu" or "core".
        count: number of slots. More cores than there are means all of them; such a run is alone on the machine.
        of: ids of the devices to choose from, the first free ones are taken. GPUs may be given by index or UUID.
        requester: distinguishes requests of one process in the queue; those for the same number of slots may share it.

    Returns:
        The lease; None if too few are free, or an earlier request waits for them. Ask again soon, and keep asking:
        otherwise the place in the queue is lost.

    Raises:
        LaunchError: more GPUs than there are, or a runtime folder that other users can write to.
    """
    if kind == "core" and of:
        count = min(count, len(of))
    if not 0 < count <= len(of):
        raise LaunchError(
            f"take {count} of {len(of)} slots of kind {kind}",
            found=", ".join(of) or "none",
            rule="at least one, and no more than there are",
            fix="place the run on another machine, or choose a smaller layout",
        )
    names = {device: f"{kind}-{gpu_uuid(device) if kind == 'gpu' else device}" for device in of}
    folder = runtime_folder() / "slots"
    folder.mkdir(mode=0o700, exist_ok=True)
    claim = {**_own_process(), "who": f"{requester} {count}", "slots": sorted(names.values())}
    with _guard(folder / f"{kind}.guard"), _queue(folder / f"{kind}.waiting") as queue:
        first = _is_first(queue, claim)
        lease = _lease_free(folder, names, count) if first else None
        entry = next((other for other in queue if _same(other, claim)), None)
        if entry is not None:
            queue.remove(entry) if lease else entry.update(seen_s=time.monotonic())
        elif lease is None:
            queue.append(claim | {"seen_s": time.monotonic()})
    return lease


def runtime_folder() -> Path:
    """The folder that processes of this user share while the machine is up, created if missing.

    Raises:
        LaunchError: it belongs to another user, or others may write there.
    """
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}"
    if given and os.access(given, os.W_OK | os.X_OK):
        folder = Path(given) / "workbench"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise LaunchError(
            f"share devices through {folder}",
            found=f"{stat.filemode(status.st_mode)} of user {status.st_uid}",
            rule=f"a folder of user {os.getuid()} that no other user can write to",
            fix="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )
    return folder


def _lease_free(folder: Path, names: dict[str, str], count: int) -> Lease | None:
    """Lock the first free slots, or none."""
    lease = Lease((), [])
    for device, name in names.items():
        file = os.open(folder / f"{name}.slot", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _lock(file) and not _used(file):
            lease.ids += (device,)
            lease._files.append(file)
            if len(lease.ids) == count:
                lease.note(**_own_process())
                return lease
        else:
            os.close(file)
    lease.release()
    return None


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _used(file: int) -> bool:
    """True if the process recorded in an unlocked slot is alive: a job whose launcher has died."""
    user = _read(file)
    return bool(user) and process_alive(user["pid"], user["create_time"])


def _is_first(queue: list[dict[str, Any]], claim: dict[str, Any]) -> bool:
    """True if no earlier request waits for a slot that this one could get."""
    for other in queue:
        if _same(other, claim):
            return True
        if set(other["slots"]) & set(claim["slots"]):
            return False
    return True


def _own_process() -> dict[str, Any]:
    process = this_process()
    return {"pid": process["pid"], "create_time": process["create_time"]}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("pid", "create_time", "who"))


_in_this_process = threading.Lock()


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """A lock between threads and processes."""
    with _in_this_process, path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _queue(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Waiting requests, in the order of arrival; written back afterwards, under the guard."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        before = _read(file).get("waiting", [])
        now_s = time.monotonic()
        waiting = [
            other
            for other in before
            if 0 <= now_s - other["seen_s"] < FORGET_AFTER_S and process_alive(other["pid"], other["create_time"])
        ]
        yield waiting
        if waiting or before:
            _write(file, {"waiting": waiting})
    finally:
        os.close(file)


def _read(file: int) -> dict[str, Any]:
    """Content of a file; {} if its writer was killed in between."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(os.pread(file, 1 << 20, 0) or b"{}"))
    return {}


def _write(file: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode() if content else b""
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
