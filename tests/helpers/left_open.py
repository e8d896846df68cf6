"""A pytest plugin: a test that leaves a file or a process open fails, by its own name.

Without it the garbage collector finds the file, and a test that had nothing to do with it fails. It costs some
microseconds a test: the numbers of the open files and of the children before and after, from /proc. Elsewhere than on
Linux it looks at nothing.

Shared on purpose, and therefore allowed by name: the fork server of `workbench.launch.processes`, that of
`multiprocessing` with its resource tracker (`tests.helpers.ranks`), torch's pool of compilers, the fonts that
matplotlib keeps, and the event loop that jupyter_core keeps for nbclient.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SHARED_PROCESSES = (
    "forkserver.py",
    "multiprocessing.forkserver",
    "multiprocessing.resource_tracker",
    "torch/_inductor/compile_worker",
)
"""What the command line of a process contains that tests share."""

SHARED_FILES = ("/dev/urandom", "/dev/null", ".ttf", ".afm")
"""How the paths of files end that are kept open on purpose."""

SHARED_MEMORY = "/dev/shm/torch_"
"""Memory of tensors that were sent to ranks: torch shares it through a file, open as long as a tensor of it lives, and
the cases of a module are kept for its other tests."""

GPU_DEVICE = "/dev/nvidia"
GPU_DRIVER = (GPU_DEVICE, "anon_inode:[eventfd]", "pipe:", "socket:")
"""Files that the CUDA driver opens at its first use in a process and keeps; pipes, event counters and a socket are its
own only where a device was opened in the same test (seen on an H200: the first GPU test of each worker failed)."""

GRACE_S = 5.0
"""For what is ending anyhow, such as a file that a thread closes."""


@pytest.fixture(autouse=True)
def _nothing_is_left_open():
    with nothing_left_open():
        yield


@contextmanager
def nothing_left_open(grace_s: float = GRACE_S) -> Iterator[None]:
    """Fail if the body opens a file or starts a process and leaves it."""
    files, processes = open_files(), children_of()
    yield
    if open_files() <= files and children_of() <= processes:
        return
    gc.collect()  # uncollected objects are closed now, and pytest reports its ResourceWarning of this test
    until = time.monotonic() + grace_s
    while left := [*_files(open_files() - files), *_processes(children_of() - processes)]:
        if time.monotonic() > until:
            pytest.fail(f"left open: {'; '.join(left)}", pytrace=False)
        time.sleep(0.02)


def open_files() -> set[int]:
    """Numbers of the files, pipes and sockets that this process has open."""
    try:
        listed = [int(number) for number in os.listdir("/proc/self/fd")]  # noqa: PTH208 (quicker)
    except OSError:
        return set()
    return {number for number in listed if _is_open(number)}  # the folder itself was open while it was listed


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def children_of(pid: int | str = "self") -> set[int]:
    """Process ids of the children of a process, including zombies; it reads no other process."""
    results: set[int] = set()
    try:
        threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 (quicker)
    except OSError:
        return results
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:  # noqa: PTH123 (quicker)
                results.update(map(int, file.read().split()))
        except OSError:  # the thread has ended
            continue
    return results


def _files(numbers: set[int]) -> list[str]:
    shared = _files_of_shared_processes()
    places = {}
    for number in sorted(numbers - shared):
        try:
            place = str(Path(f"/proc/self/fd/{number}").readlink())
        except OSError:  # closed since
            continue
        if not place.endswith(SHARED_FILES) and not place.startswith(SHARED_MEMORY):
            places[number] = place
    if any(place.startswith(GPU_DEVICE) for place in places.values()):
        places = {number: place for number, place in places.items() if not place.startswith(GPU_DRIVER)}
    return [f"file {number}, {place}" for number, place in places.items()]


def _processes(pids: set[int]) -> list[str]:
    results = []
    for pid in sorted(pids):
        try:
            command = _command(pid)
        except OSError:
            continue
        if not any(name in command for name in SHARED_PROCESSES):
            results.append(f"process {pid}, {command or 'ended, and nobody waited for it'}")
    return results


def _command(pid: int) -> str:
    """The command line of a process; "" of one that has ended.

    It is empty, too, between the moment in which `subprocess.Popen` returns, when exec closes the files, and the one in
    which the kernel has placed the arguments: seen with forty programs on two cores.
    """
    for _ in range(1000):
        if command := Path(f"/proc/{pid}/cmdline").read_bytes():
            return command.replace(b"\0", b" ").decode(errors="replace").strip()
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.01)
    return ""


def _files_of_shared_processes() -> set[int]:
    """Numbers of the files through which this process talks to the processes that tests share."""
    results: set[int | None] = set()
    if (module := sys.modules.get("workbench.launch.processes")) is not None and (server := module._started):
        results |= {server.control.fileno(), server.errors.fileno()}
    if (module := sys.modules.get("multiprocessing.forkserver")) is not None:
        results.add(module._forkserver._forkserver_alive_fd)
    if (module := sys.modules.get("multiprocessing.resource_tracker")) is not None:
        results.add(module._resource_tracker._fd)
    if (module := sys.modules.get("jupyter_core.utils")) is not None and (loop := module._loop.get()) is not None:
        results |= {part.fileno() for part in (loop._selector, loop._ssock, loop._csock)}
    if (module := sys.modules.get("torch._inductor.async_compile")) is not None:
        results |= _both_ends([pipe for pool in module._pool_set for pipe in _pipes_of(pool)])
    return {number for number in results if number is not None}


def _pipes_of(pool: Any) -> list[Any]:
    """Pipes of a pool of torch's compilers, which a first compilation on a GPU starts; none of a pool of threads."""
    return [pipe for name in ("read_pipe", "write_pipe") if (pipe := getattr(pool, name, None)) and not pipe.closed]


def _both_ends(pipes: list[Any]) -> set[int]:
    """Numbers of all files of some pipes: torch's pool keeps the ends of its compilers open here, too."""
    inodes = {os.fstat(pipe.fileno()).st_ino for pipe in pipes}
    return {number for number in open_files() if os.fstat(number).st_ino in inodes} if inodes else set()
