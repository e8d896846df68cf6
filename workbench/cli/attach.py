"""`workbench attach`: follow runs that another process launched, until they have ended."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import tyro

from workbench.cli.status import list_lines
from workbench.cli.terminal import answered, print_lines, safe_lines, width
from workbench.launch.detached import launchers
from workbench.launch.status import Listed, listing
from workbench.records.lookup import look_up
from workbench.records.states import ENDED

_POLL_S = 0.5


def attach(
    run_or_experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_EXPERIMENT")],
) -> int:
    """Follow a run, or all runs of an experiment, until they have ended; an interrupt (Ctrl-C) leaves them running.

    A line is printed when a run begins and when it ends. Exit code 0: all of them succeeded; 1: one did not.

    Args:
        run_or_experiment: A folder, an experiment's name, or the beginning of a run's name.
    """
    target = look_up(run_or_experiment)
    folder = target.runs[0].experiment_dir
    for launcher in launchers(folder / "runs"):
        _say(f"process {launcher.pid} {launcher.doing} them, detached; its log: {launcher.log}")
    shown: dict[str, str] = {}
    try:
        while True:
            # runs are looked up again: one that never started is removed when it is cancelled
            listed = [listing(entry) for entry in look_up(run_or_experiment).runs]
            changed = [run for run in listed if shown.get(run.folder) != run.state]
            if changed:
                print_lines(list_lines(changed, letters=width())[0 if not shown else 1 :])
                sys.stdout.flush()
            shown = {run.folder: run.state for run in listed}
            if all(map(_ended, listed)) and not launchers(folder / "runs"):
                answered(functools.partial(_as_data, listed))
                return 0 if all(run.state == "succeeded" for run in listed) else 1
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        _say(f"the runs continue; workbench cancel {run_or_experiment} ends them")
        raise


def _as_data(listed: Sequence[Listed]) -> list[dict[str, Any]]:
    return [asdict(run) for run in listed]


def _ended(run: Listed) -> bool:
    return run.state in ENDED or run.state == "unreadable"


def _say(line: str) -> None:
    print("\n".join(safe_lines(line)), file=sys.stderr)
