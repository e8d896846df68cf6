"""Measurements of a benchmark, entry by entry, in jobs of several ranks; a failing entry does not affect the others.

An entry is ``WORKLOAD/LAYOUT``; its result is written to a file of its own as soon as it is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.atomic import from_json, to_json, write_whole
from workbench.errors import LaunchError

GIVE_UP_S = 120.0
"""For a collective: longer than kernels take to compile, which may fall between two ranks."""
JOB_S = 300.0
"""For a job that is measured as a whole."""
OUT = "WORKBENCH_BENCH_OUT"
"""Environment variable: path of the first rank's result."""


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
        command = _job(module, ranks, folder, *arguments, deadline, *left)
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


def job_output(module: str, ranks: int, *arguments: object, what: str) -> Any:
    """Run a job of several ranks, of which the first writes JSON to the path in the environment variable `OUT`.

    Raises:
        LaunchError: ranks that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.json"
        done = subprocess.run(
            _job(module, ranks, *arguments),
            env=os.environ | {OUT: str(out)},
            capture_output=True,
            text=True,
            timeout=JOB_S,
            check=False,
        )
        if done.returncode:
            raise LaunchError(
                what,
                found=done.stderr[-2000:],
                rule="every rank ends with 0",
                fix="read the ranks' last output above",
            )
        return json.loads(out.read_text())


def _job(module: str, ranks: int, *arguments: object) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *launcher, "-m", module, *map(str, arguments)]


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
