"""The measurements of a benchmark, entry by entry, in jobs of several ranks; one that dies takes no other with it.

An entry is ``WORKLOAD/LAYOUT``; what was found of it lies in a file of its own as soon as it is known.
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
    told: Callable[[str], None],
    needed: Callable[[], str],
) -> None:
    """Run entries in one job; if it dies, name the entry at which it did, and go on with the others in another.

    Args:
        module: of a rank; it is called with the folder, the arguments, the deadline and the entries.
        ranks: of the job.
        entries: to measure, in order.
        folder: where ranks write what they found, and why they failed (`saying_why`).
        arguments: further ones.
        deadline: no entry is begun after it; seconds since 1970.
        told: told what is being measured, and what failed.
        needed: asked when a job has died: why nothing can go on without it, "" if the others can.

    Raises:
        LaunchError: what died is needed by all that is left.
    """
    left = list(entries)
    environment = os.environ | {"OMP_NUM_THREADS": "4" if torch.cuda.is_available() else "1"}
    while left and time.time() < deadline:
        told(f"{ranks} rank(s): {', '.join(left)}")
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
        words = "no answer in time"
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
            words = done.stderr[-2000:]
        said = sorted(folder.glob("failed*"))
        words = said[0].read_text() if said else words
        at = next((entry for entry in left if not entry_file(folder, entry).exists()), left[-1])
        told(f"{at}: {words}")
        if why := needed():
            raise LaunchError(f"{module}, {at}", found=words, rule=why, fix="read its last words above")
        for file in said:
            file.unlink()
        write_whole(entry_file(folder, at), to_json({"left_out": words.strip().splitlines()[-1]}))
        left = left[left.index(at) + 1 :]


def entry_file(folder: Path, entry: str) -> Path:
    """Where what was found of an entry lies."""
    return folder / f"{entry.replace('/', '.')}.json"


def found_of(folder: Path, entry: str) -> dict[str, Any]:
    """What was found of an entry, or why it was left out."""
    file = entry_file(folder, entry)
    return from_json(file.read_text()) if file.exists() else {"left_out": "not reached"}


@contextlib.contextmanager
def saying_why(folder: Path) -> Iterator[None]:
    """On a rank: why it failed lies in the folder then, whatever became of its output."""
    try:
        yield
    except BaseException:
        (folder / f"failed{os.environ.get('RANK', '0')}").write_text(traceback.format_exc())
        raise
