"""Ranks without torch, for tests of watching: processes that enter and leave made-up collectives on command.

a      enters the collective "a" of all ranks, and leaves it
(a     enters it and stays there, for minutes
|2     does nothing for two seconds
|go    does nothing until the run directory has a file "go"
end    says that it ended well, and ends
gone   ends with exit code 0 and says nothing
raise  writes the exit record of an exception, and ends with exit code 1
says   is about to say that it failed, for minutes: its stack is that of writing an exit record
deaf   ignores SIGTERM from here on
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import pretended_rank
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.specs.run import RunSpec


@contextlib.contextmanager
def pretended_ranks(
    folder: Path, *plans: str, timeout_s: float = 120.0
) -> Iterator[tuple[RunDirectory, list[subprocess.Popen[bytes]]]]:
    """A run directory and a process for each plan, which has done all that it can when the block begins.

    A plan "-" is a process that knows nothing of all this.
    """
    run = RunDirectory.create(folder, "pretended", RunSpec(layout={"cp": len(plans)}, timeout_s=timeout_s))
    environment = os.environ | {"PYTHONPATH": str(project_root())}
    ranks = []
    for rank, plan in enumerate(plans):
        program = [pretended_rank.__name__, str(run.path), str(rank), str(len(plans))]
        command = (
            [sys.executable, "-c", "import time; time.sleep(300)"]
            if plan == "-"
            else [sys.executable, "-m", *program, *plan.split()]
        )
        ranks.append(subprocess.Popen(command, env=environment))
    try:
        deadline = time.monotonic() + 120
        for rank, plan in enumerate(plans):
            while plan != "-" and not (run.path / f"ready{rank}").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        yield run, ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
