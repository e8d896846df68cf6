"""The program of a rank of `tests.helpers.pretended_ranks`.

It imports a recorder of collectives and little else: with the directory of its run, whose spec has a model for every
loss, a start took half a second of CPU time, and there are some fifty.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from workbench.sharding import flight
from workbench.train.watched import enable_diagnostics


class Folder:
    """The part of a run directory that the recorder needs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_path(self, rank: int) -> Path:
        """As `RunDirectory.log_path`."""
        return self.path / f"ranks/rank{rank:05d}.log"


def main() -> None:
    """Do the words of a plan."""
    folder, rank, everybody = Path(sys.argv[1]), int(sys.argv[2]), range(int(sys.argv[3]))
    run: Any = Folder(folder)
    enable_diagnostics(run, rank)
    for word in sys.argv[4:]:
        if word == "end":
            exit_record(folder, rank, None)
            flight.stop()
        if word in ("end", "gone"):
            (folder / f"ready{rank}").touch()
            os._exit(0)
        if word == "raise":
            exit_record(folder, rank, ValueError("enough"))
            (folder / f"ready{rank}").touch()
            os._exit(1)
        if word == "says":
            write_exit(folder / f"ready{rank}")
        elif word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif word.startswith("|"):
            (folder / f"ready{rank}").touch()
            if word == "|go":
                while not (folder / "go").exists():
                    time.sleep(0.02)
            else:
                time.sleep(float(word[1:]))
        else:
            with flight.entering(word.removeprefix("("), "cp", everybody, "g", (2,), "float32"):
                if word.startswith("("):
                    stay(folder / f"ready{rank}")
    stay(folder / f"ready{rank}")


def exit_record(folder: Path, rank: int, error: Exception | None) -> None:
    """Write how this rank ends, as a worker does."""
    from workbench.records.directory import RunDirectory

    RunDirectory.open(folder).write_exit(rank, {}, error)


def stay(ready: Path) -> None:
    """Hang."""
    ready.touch()
    time.sleep(300)


def write_exit(ready: Path) -> None:
    """Stand where a rank that failed stands: in a frame of this name."""
    stay(ready)


if __name__ == "__main__":
    main()
