"""Measurements of a benchmark, entry by entry, in jobs of several ranks; a failing entry does not affect the others.

An entry is ``WORKLOAD/LAYOUT``; its result is written to a file of its own as soon as it is known.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.errors import LaunchError
from workbench.records.directory import from_json, to_json, write_whole

GIVE_UP_S = 120.0
"""For a collective: longer than kernels take to compile, which may fall between two ranks."""


def run_entries(
    module: str,
    ranks: int,
    entries: Sequence[str],
    folder: Path,
    *arguments: object,
    deadline: float,
    report_progress: Callable[[str], None],
    needed: Callable[[], str],
) -> None:
    """Run entries in one job; if it dies, name the entry at which it did, and continue with the others in another job.

    Args:
        module: of a rank; it is called with the folder, the arguments, the deadline and the entries.
        ranks: of the job.
        entries: to measure, in order.
        folder: for the results of the ranks, and the causes of failures (`saying_why`).
        arguments: further ones.
        deadline: no entry is started after it; seconds since 1970.
        report_progress: called with the entries being measured, and with failures.
        needed: called when a job has died; returns why the remaining entries need it, "" if they do not.

    Raises:
        LaunchError: the remaining entries need the one that died.
    """
    left = list(entries)
    environment = os.environ | {"OMP_NUM_THREADS": "4" if torch.cuda.is_available() else "1"}
    while left and time.time() < deadline:
        report_progress(f"{ranks} rank(s): {', '.join(left)}")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            module,
            *map(str, (folder, *arguments, deadline)),
            *left,
        ]
        message = "no answer in time"
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=deadline - time.time() + GIVE_UP_S,
            )
            if not done.returncode:
                return
            message = done.stderr[-2000:]
        failures = sorted(folder.glob("failed*"))
        message = failures[0].read_text() if failures else message
        failed = next((entry for entry in left if not entry_file(folder, entry).exists()), left[-1])
        report_progress(f"{failed}: {message}")
        if why := needed():
            raise LaunchError(f"{module}, {failed}", found=message, rule=why, fix="read its last output above")
        for file in failures:
            file.unlink()
        write_whole(entry_file(folder, failed), to_json({"left_out": message.strip().splitlines()[-1]}))
        left = left[left.index(failed) + 1 :]


def entry_file(folder: Path, entry: str) -> Path:
    """Path of the result of an entry."""
    return folder / f"{entry.replace('/', '.')}.json"


def result_of(folder: Path, entry: str) -> dict[str, Any]:
    """Read the result of an entry, or why it was left out."""
    file = entry_file(folder, entry)
    return from_json(file.read_text()) if file.exists() else {"left_out": "not reached"}


@contextlib.contextmanager
def recording_failure(folder: Path) -> Iterator[None]:
    """On a rank: write the traceback of a failure into the folder, because the rank's output may be lost."""
    try:
        yield
    except BaseException:
        (folder / f"failed{os.environ.get('RANK', '0')}").write_text(traceback.format_exc())
        raise
