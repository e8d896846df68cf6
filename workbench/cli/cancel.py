"""`workbench cancel`: cancel a run, or all runs of an experiment, from any terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.terminal import print_lines, safe
from workbench.launch.cancel import cancel_run
from workbench.records.directory import ENDED
from workbench.records.lookup import look_up

BY = "the command line"


def cancel(
    target: str | Path,
    *,
    by: str = BY,
    project: Path | None = None,
    on_end: Callable[[str, str, bool], None] | None = None,
) -> dict[str, str]:
    """Cancel a run, or all runs of an experiment that have not ended, and wait until they have.

    Args:
        target: see `workbench.records.lookup.look_up`.
        by: the requester, for the record.
        project: the folder that holds ``experiments``; None takes `project_root`.
        on_end: called with the name of the folder, its state, and True if it had ended before.

    Returns:
        Name of each run's folder -> its final state.

    Raises:
        RecordError: nothing of that name, or runs that cannot be opened.
    """
    runs = look_up(target, project).opened()
    # the recorded state, not `status`: a run that looks lost from here may still wait in a cluster's queue
    ended = {run.path.name for run in runs if run.state["state"] in ENDED}
    for run in runs:
        if run.path.name not in ended:
            run.request_cancel(by)  # all of them first, so that none is started while another is waited for
    states = {}
    for run in runs:
        folder, had_ended = run.path.name, run.path.name in ended
        states[folder] = run.status if had_ended else cancel_run(run, by=by)
        if on_end:
            on_end(folder, states[folder], had_ended)
    return states


def _message(folder: str, state: str, had_ended: bool) -> str:
    if had_ended:
        return f"{safe(folder)}: had ended before: {state}"
    if state in ENDED:
        return f"{safe(folder)}: {state}" + ("" if state == "cancelled" else ", before it could be cancelled")
    return f"{safe(folder)}: still {state}; cancellation was requested and is not complete"


def _cancel(run_or_experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_EXPERIMENT")]) -> int:
    """Cancel a run, or all runs of an experiment that have not ended, and wait until they have.

    Exit code 0 if all of them have ended now, 1 if one has not.

    Args:
        run_or_experiment: A folder, an experiment's name, or the beginning of a run's name.
    """
    states = cancel(run_or_experiment, on_end=lambda *ended: print_lines([_message(*ended)]))
    return 0 if all(state in ENDED for state in states.values()) else 1


def main(arguments: Sequence[str]) -> int:
    """Run `workbench cancel`."""
    return tyro.cli(_cancel, args=list(arguments), prog="workbench cancel")
