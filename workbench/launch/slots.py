"""Who uses which GPU and which core of this machine: leases between all processes of a user that launch runs.

A slot is a file that its holder has locked, so the kernel frees it when the holder dies, however that ends. A job may
outlive its launcher by seconds: a slot in which a process is noted is not free before that process is gone, too.

Whoever comes first is served first. Who finds too little free is put on a waiting list, and keeps its place by asking
again, at least every `FORGET_AFTER_S`; until it has what it wants, no later one takes slots that it could use. So a
stream of small runs cannot starve a large one.

The files lie in a folder of this user and this boot: XDG_RUNTIME_DIR, or one in the system's temporary folder where
that is not set. Other users, other containers, and processes that see another such folder are not seen. Cores are
counted, not pinned.
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
"""Who has not asked again for so long has no place on the waiting list any more."""


@dataclass
class Lease:
    """Slots that are ours until they are released, or this process ends.

    Attributes:
        ids: of the devices, in the order in which they were offered.
    """

    ids: tuple[str, ...]
    _files: list[int] = field(repr=False)

    def note(self, pid: int, create_time: float) -> None:
        """Say which process uses the slots: they stay taken while it lives, even after this process.

        Args:
            pid: of the process that starts the ranks.
            create_time: psutil's, in seconds.
        """
        for file in self._files:
            _write(file, {"pid": pid, "create_time": create_time})

    def release(self) -> None:
        """Give the slots back, whoever is noted; nothing if that was done."""
        while self._files:
            file = self._files.pop()
            _write(file, {})
            fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that inherited the file
            os.close(file)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def take(kind: str, wanted: int, of: Sequence[str], *, who: str = "") -> Lease | None:
    """Take free slots at once, or none at all.

    Args:
        kind: "gpu" or "core".
        wanted: how many. More cores than there are means all of them; such a run is alone on the machine.
        of: ids of the devices to choose from, the first free ones are taken. GPUs may be called by index or UUID.
        who: tells askers of one process apart on the waiting list; two that want equally much need not be.

    Returns:
        The lease; None if too few are free, or somebody who came before waits for them. Ask again soon, and keep
        asking: the place on the waiting list is lost otherwise.

    Raises:
        LaunchError: more GPUs than there are, or a runtime folder that is not ours alone.
    """
    if kind == "core" and of:
        wanted = min(wanted, len(of))
    if not 0 < wanted <= len(of):
        raise LaunchError(
            f"take {wanted} of {len(of)} slots of kind {kind}",
            found=", ".join(of) or "none there",
            rule="at least one, and no more than there are",
            fix="place the run on another machine, or choose a smaller layout",
        )
    names = {device: f"{kind}-{gpu_uuid(device) if kind == 'gpu' else device}" for device in of}
    folder = runtime_folder() / "slots"
    folder.mkdir(mode=0o700, exist_ok=True)
    claim = {**_me(), "who": f"{who} {wanted}", "slots": sorted(names.values())}
    with _guard(folder / f"{kind}.guard"), _waiting_list(folder / f"{kind}.waiting") as waiting:
        first = _first_for(waiting, claim)
        lease = _free(folder, names, wanted) if first else None
        mine = next((other for other in waiting if _same(other, claim)), None)
        if mine is not None:
            waiting.remove(mine) if lease else mine.update(seen_s=time.monotonic())
        elif lease is None:
            waiting.append(claim | {"seen_s": time.monotonic()})
    return lease


def runtime_folder() -> Path:
    """The folder for what processes of this user tell each other while the machine is up, made if missing.

    Raises:
        LaunchError: it belongs to somebody else, or others may write there.
    """
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}"
    if given and os.access(given, os.W_OK | os.X_OK):
        folder = Path(given) / "workbench"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise LaunchError(
            f"share devices through {folder}",
            found=f"{stat.filemode(found.st_mode)} of user {found.st_uid}",
            rule=f"a folder of user {os.getuid()} that nobody else can write to",
            fix="remove it, or set XDG_RUNTIME_DIR to a folder of your own",
        )
    return folder


def _free(folder: Path, names: dict[str, str], wanted: int) -> Lease | None:
    """Lock the first free slots, or none."""
    lease = Lease((), [])
    for device, name in names.items():
        file = os.open(folder / f"{name}.slot", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _lock(file) and not _used(file):
            lease.ids += (device,)
            lease._files.append(file)
            if len(lease.ids) == wanted:
                lease.note(**_me())
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
    """Whether the process that is noted in an unlocked slot still lives: a job whose launcher has died."""
    noted = _read(file)
    return bool(noted) and process_alive(noted["pid"], noted["create_time"])


def _first_for(waiting: list[dict[str, Any]], claim: dict[str, Any]) -> bool:
    """Whether nobody who came before waits for a slot that this one could get."""
    for other in waiting:
        if _same(other, claim):
            return True
        if set(other["slots"]) & set(claim["slots"]):
            return False
    return True


def _me() -> dict[str, Any]:
    me = this_process()
    return {"pid": me["pid"], "create_time": me["create_time"]}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("pid", "create_time", "who"))


_in_this_process = threading.Lock()


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[None]:
    """One at a time, among threads and processes."""
    with _in_this_process, path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _waiting_list(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Those who wait, in the order in which they came; written back afterwards, under the guard."""
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
    """What a file says; nothing if its writer was killed in between."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(os.pread(file, 1 << 20, 0) or b"{}"))
    return {}


def _write(file: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode() if content else b""
    os.pwrite(file, data, 0)
    os.ftruncate(file, len(data))
