"""A folder in memory for the temporary files of tests."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")
LEAST_BYTES = 4 * 2**30
"""Free memory without which temporary files stay on the disk. A run of the whole suite makes 0.2 GB of them; containers
often have 64 MiB of shared memory."""


def folder_for_temporary_files(shared: Path = SHARED, least: int = LEAST_BYTES) -> str | None:
    """Make a folder in memory and return its path; None if the machine has no such file system or too little memory.

    The path is short, because that of a socket may have 107 bytes.
    """
    try:
        free = min(shutil.disk_usage(shared).free, psutil.virtual_memory().available)
        return tempfile.mkdtemp(prefix="wb-", dir=shared) if free >= least else None
    except OSError:
        return None
