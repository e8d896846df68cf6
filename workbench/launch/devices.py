"""Placement of runs on this machine's devices, before they start and without torch; and leases of GPUs and cores.

Leases are between all processes of a user that launch runs. A slot is a file that its holder has locked, so the kernel
frees it when the holder dies for any reason. A job may outlive its launcher by seconds: a slot in which a process is
recorded is not free before that process is gone, too.

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
import functools
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.atomic import locked
from workbench.errors import LaunchError
from workbench.records.provenance import own_process, process_alive
from workbench.specs.run import RunSpec

FORGET_AFTER_S = 5.0
"""A request that was not repeated for this long loses its place in the queue."""

_in_this_process = threading.Lock()


@dataclass(frozen=True)
class Placement:
    """Device of a run.

    Attributes:
        device: "cpu" or "cuda".
        note: the reason, "" if it is the requested device.
        gpus: ids for CUDA_VISIBLE_DEVICES, one a rank; empty on CPU.
        nodes: machines that the ranks are spread over, equally many on each.
    """

    device: str
    note: str = ""
    gpus: tuple[str, ...] = ()
    nodes: int = 1


def visible_gpus() -> list[str]:
    """Ids of the GPUs that a run may use, as CUDA_VISIBLE_DEVICES takes them; [] without a driver."""
    present = [str(index) for index in range(len(_uuids()))]
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None or not present:
        return present
    names = (part.strip() for part in allowed.split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # CUDA ignores the rest, too


def cores() -> list[str]:
    """The cores that this process may use, by number."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return [str(core) for core in sorted(usable)]


def gpu_uuid(device: str) -> str:
    """Canonical name of a GPU, given its index, its UUID or the beginning of that.

    A name that the driver does not list, such as a MIG instance's, is returned as it is.
    """
    uuids = _uuids()
    if device.isdecimal() and int(device) < len(uuids):
        return uuids[int(device)]
    matches = [uuid for uuid in uuids if device and uuid.startswith(device)]
    return matches[0] if len(matches) == 1 else device


def place(name: str, spec: RunSpec, gpus: Sequence[str]) -> Placement:
    """Assign a device to a run: `auto` takes GPUs if there are as many as ranks, and CPU with gloo otherwise.

    Raises:
        LaunchError: the spec requires cuda and there are too few GPUs.
    """
    ranks = spec.layout.world_size
    if spec.device == "cpu":
        return Placement("cpu")
    if len(gpus) >= ranks:
        return Placement("cuda", gpus=tuple(gpus[:ranks]))
    needed = f"{ranks} GPU{'s' if ranks > 1 else ''}"
    if spec.device == "cuda":
        raise LaunchError(
            f"run {name} on cuda",
            found=f"{len(gpus)} of {needed} here",
            rule="one GPU for each rank",
            fix="set device: auto to run on CPU where GPUs are missing, or use another machine",
        )
    return Placement("cpu", note=f"asked for {needed}, {len(gpus)} here" if gpus else "no GPU here")


def _uuids() -> list[str]:
    """UUID of every GPU, by index; [] without a driver. A query takes up to a second, so the result is cached."""
    tool = shutil.which("nvidia-smi")
    return [] if tool is None else list(_uuids_by(tool))


@functools.cache
def _uuids_by(tool: str) -> tuple[str, ...]:
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = (line for line in done.stdout.splitlines() if line.startswith("GPU "))
    return tuple(uuid[1] if (uuid := re.search(r"UUID: ([\w-]+)", line)) else line.split(":")[0] for line in gpus)


# ---- leases ----------------------------------------------------------------------------------------------


@dataclass
class Lease(contextlib.AbstractContextManager["Lease"]):
    """Slots of this process until they are released, or it ends."""

    ids: tuple[str, ...]  # of the devices, in the order in which they were offered
    _files: list[int] = field(repr=False)

    def note(self, pid: int, create_time: float) -> None:
        """Record the process that uses the slots: they stay taken while it lives, even after this process."""
        for file in self._files:
            _write(file, {"pid": pid, "create_time": create_time})

    def release(self) -> None:
        """Free the slots, whichever process is recorded; nothing if that was done."""
        while self._files:
            file = self._files.pop()
            _write(file, {})
            fcntl.flock(file, fcntl.LOCK_UN)  # also for a child that inherited the file
            os.close(file)

    def __exit__(self, *raised: object) -> None:
        self.release()


def take(kind: str, count: int, of: Sequence[str], *, requester: str = "") -> Lease | None:
    """Take free slots at once, or none at all.

    Args:
        kind: "gpu" or "core".
        count: number of slots. More cores than there are means all of them; such a run is alone on the machine.
        of: ids of the devices to choose from, the first free ones are taken. GPUs may be given by index or UUID.
        requester: distinguishes requests of one process in the queue; each has one place, for what it last requested.

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
    claim = {**own_process(), "who": requester, "slots": sorted(names.values())}
    with _in_this_process, locked(folder / f"{kind}.guard"), _queue(folder / f"{kind}.waiting") as queue:
        identity = ("pid", "create_time", "who")
        entry = next((other for other in queue if all(other[key] == claim[key] for key in identity)), None)
        earlier = queue if entry is None else queue[: queue.index(entry)]
        blocked = any(set(other["slots"]) & set(claim["slots"]) for other in earlier)
        lease = None if blocked else _lease_free(folder, names, count)
        if entry is not None:
            queue.remove(entry) if lease else entry.update(seen_s=time.monotonic(), slots=claim["slots"])
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
        if _lock_free(file):
            lease.ids += (device,)
            lease._files.append(file)
            if len(lease.ids) == count:
                lease.note(**own_process())
                return lease
        else:
            os.close(file)
    lease.release()
    return None


def _lock_free(file: int) -> bool:
    """Lock a slot; False if it is locked, or a process recorded in it lives: a job whose launcher has died."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    user = _read(file)
    return not (user and process_alive(user["pid"], user["create_time"]))


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
