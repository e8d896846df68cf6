"""File systems that are really full, out of inodes or read-only: a small tmpfs, mounted for one trial.

Errors that a test raises itself (`file_operations.fail_at`) come at one operation; those of a kernel come at every
later one too, from native code as well, and also when a half-written file is to be removed. Mounting needs a right
that not every user has: `Unavailable` says which one was refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.file_operations import Operations, check, child

KINDS = ("full", "no inode left", "read-only")

_READ_ONLY, _REMOUNT, _DETACH = 1, 32, 2  # MS_RDONLY, MS_REMOUNT: linux/mount.h; MNT_DETACH: umount2(2)
_ROOM = "size=4m,nr_inodes=1000"
_SMALLEST_KB, _LARGEST_KB = 4, 96  # a run of three steps takes some 60 kB
_FEWEST, _MOST = 2, 20  # inodes; such a run takes about 15


class Unavailable(Exception):
    """This process may not mount a file system."""


def _mount(path: Path, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


@contextlib.contextmanager
def small(path: Path, options: str) -> Iterator[None]:
    """Mount a tmpfs at a folder.

    Raises:
        Unavailable: not permitted.
    """
    path.mkdir(parents=True)
    try:
        _mount(path, 0, options)
    except OSError as error:
        raise Unavailable(f"a tmpfs cannot be mounted here: {error.strerror}") from None
    try:
        yield
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(path), _DETACH)


def tell(folder: Path, kind: str, draw: random.Random) -> str:
    """Write a run on a file system that fails, give it room again, and compare the run with what its writer was told.

    Returns:
        "refused" if the writer was stopped by an error, "whole" if it had room enough.
    """
    options = {
        "full": f"size={draw.randint(_SMALLEST_KB, _LARGEST_KB)}k",
        "no inode left": f"size=4m,nr_inodes={draw.randint(_FEWEST, _MOST)}",
        "read-only": _ROOM,
    }[kind]
    with small(folder, options):
        operations = Operations(0, lambda half: None)
        if kind == "read-only":
            operations = Operations(draw.randint(1, 40), lambda half: _make_read_only(folder, operations))
        status, told = child(folder / "runs", draw.randrange(2**32), operations)
        _mount(folder, _REMOUNT, _ROOM)
        assert status == 0, f"the writer ended with {os.waitstatus_to_exitcode(status)}"
        check(folder / "runs", told, killed=kind == "read-only")  # nothing can be removed from a read-only one
        return "whole" if told[-1][0] == "operations" else "refused"


def _make_read_only(folder: Path, operations: Operations) -> None:
    """Remount; the kernel refuses that while a file is open for writing, and then the next operation tries again."""
    try:
        _mount(folder, _REMOUNT | _READ_ONLY, "")
    except OSError:
        operations.at += 1
