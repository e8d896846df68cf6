"""The process of a detached launcher, `python -m workbench.cli.launcher FD`; see `workbench.launch.detached`.

It reads a request from its standard input, and answers on a pipe: None once every run has a directory, or the error.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from workbench.errors import LaunchError, WorkbenchError
from workbench.experiment import Experiment
from workbench.launch.detached import Record, recorded


def main(request: dict[str, Any], answer: BinaryIO) -> None:
    """Launch the requested experiment, wait for its runs, and compare them if that was requested."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # in order: the jobs are ended first
    with _errors_to(answer):
        experiment = Experiment(
            request["ablation"], only=request["only"], changes=request["changes"], project=Path(request["project"])
        )
    with recorded(experiment.folder / "runs") as record:
        with _errors_to(answer):
            experiment.launch(**request["launching"], detached=False)
        record.write("watches")
        pickle.dump(None, answer)
        answer.close()
        _finish(experiment, record, report=request["report"])


@contextlib.contextmanager
def _errors_to(answer: BinaryIO) -> Iterator[None]:
    try:
        yield
    except WorkbenchError as error:
        pickle.dump(error, answer)
        raise SystemExit(1) from None
    except Exception as error:
        pickle.dump(_unexpected(error), answer)
        raise


def _finish(experiment: Experiment, record: Record, *, report: bool) -> None:
    try:
        experiment.wait()
        if report:
            record.write("compares")
            print(f"report: {experiment.report()}")
    except WorkbenchError as error:  # for the log
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        experiment.tracking.close()


def _unexpected(error: Exception) -> LaunchError:
    return LaunchError(
        "launch, detached",
        found=f"{type(error).__name__}: {error}",
        rule="a launcher fails with an error of the workbench only",
        fix="its log, in runs/launchers of the experiment, has the traceback: please report it",
    )


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "wb") as pipe:
        main(json.load(sys.stdin), pipe)
