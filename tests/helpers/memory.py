"""A folder in memory for the temporary files of tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
LEAST_BYTES = 4 * 2**30
"""Free memory without which temporary files stay on the disk. A run of the whole suite makes 0.2 GB of them; containers
often have 64 MiB of shared memory."""

PREFIX = "wb-tests-"
"""Short, because the path of a socket may have 107 bytes."""

YOUNG_S = 60.0
"""Age of a folder that may not be locked yet by the run that has made it."""


def folder_for_temporary_files(shared: Path = SHARED, least: int = LEAST_BYTES) -> tuple[str, int] | None:
    """Make a folder in memory; None if the machine has no such file system or too little memory.

    Folders of runs that were killed are removed: those that nobody has locked.

    Returns:
        Its path, and the open file that locks it.
    """
    try:
        free = min(shutil.disk_usage(shared).free, psutil.virtual_memory().available)
        if free < least:
            return None
        _remove_abandoned(shared)
        made = tempfile.mkdtemp(prefix=PREFIX, dir=shared)
        lock = _locked(Path(made))
    except OSError:
        return None
    assert lock is not None, "nobody knows of it yet"
    return made, lock


def _remove_abandoned(shared: Path) -> None:
    for folder in shared.glob(f"{PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < YOUNG_S or (lock := _locked(folder)) is None:
                continue
        except OSError:  # another user's, or removed by another run meanwhile
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder and return the open file; None if another process has it locked."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number
