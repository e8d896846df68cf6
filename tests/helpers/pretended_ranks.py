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
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.sharding import flight
from workbench.specs.run import RunSpec
from workbench.train.watched import enable_diagnostics


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
        command = (
            [sys.executable, "-c", "import time; time.sleep(300)"]
            if plan == "-"
            else [sys.executable, "-m", __name__, str(run.path), str(rank), *plan.split()]
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


def main() -> None:
    """Be one of them."""
    run, rank = RunDirectory.open(Path(sys.argv[1])), int(sys.argv[2])
    enable_diagnostics(run, rank)
    everybody = range(run.spec.layout.world_size)
    for word in sys.argv[3:]:
        if word == "end":
            run.write_exit(rank, {}, None)
            flight.stop()
        if word in ("end", "gone"):
            (run.path / f"ready{rank}").touch()
            os._exit(0)
        if word == "raise":
            run.write_exit(rank, {}, ValueError("enough"))
            (run.path / f"ready{rank}").touch()
            os._exit(1)
        if word == "says":
            write_exit(run.path / f"ready{rank}")
        elif word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word.startswith("|"):
            (run.path / f"ready{rank}").touch()
            if word == "|go":
                while not (run.path / "go").exists():
                    time.sleep(0.02)
            else:
                time.sleep(float(word[1:]))
        else:
            with flight.entering(word.removeprefix("("), "cp", everybody, "g", (2,), "float32"):
                if word.startswith("("):
                    stay(run.path / f"ready{rank}")
    stay(run.path / f"ready{rank}")


def stay(ready: Path) -> None:
    """Hang."""
    ready.touch()
    time.sleep(300)


def write_exit(ready: Path) -> None:
    """Stand where a rank that failed stands: in a frame of this name."""
    stay(ready)


if __name__ == "__main__":
    main()
