"""`workbench export`: export runs to W&B, trackio, MLflow or TensorBoard, offline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.terminal import print_lines, safe
from workbench.records.lookup import look_up
from workbench.report.exporters import TRACKERS
from workbench.report.exporters.export import Exported, TrackerName, default_folder, export_runs


def export(
    target: str | Path,
    *,
    to: TrackerName,
    project: str = "workbench",
    folder: Path | None = None,
    root: Path | None = None,
) -> list[Exported]:
    """Export a run, or each run of an experiment, to a tracker; see `export_runs`.

    Args:
        target: see `workbench.records.lookup.look_up`.
        to: the tracker.
        project: the tracker's project, above the experiment.
        folder: gets the tracker's files; None takes ``runs/exports/<tracker>`` of the experiment.
        root: the folder that holds ``experiments``; None takes `project_root`.

    Raises:
        RecordError: nothing of that name, or runs that cannot be opened.
        LaunchError: the tracker's package is not installed, or it failed.
        SpecError: a project name that cannot be used everywhere.
    """
    return export_runs(look_up(target, root).opened(), to=to, project=project, folder=folder)


def lines_of(exported: Sequence[Exported]) -> list[str]:
    """Return the outcome of each run as text, and once each what the tracker could not store as it is."""
    lines = []
    for run in exported:
        steps = f", {run.steps} step{'' if run.steps == 1 else 's'}" if run.outcome == "exported" else ""
        lines.append(safe(f"{run.id}: {run.outcome}{steps}" + (f": {run.why}" if run.why else "")))
    notes = Counter(note for run in exported for note in run.notes)
    return lines + [safe(f"  in {count} run{'' if count == 1 else 's'}: {note}") for note, count in notes.items()]


def _export(
    run_or_experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_EXPERIMENT")],
    *,
    to: TrackerName,
    project: str = "workbench",
    folder: Path | None = None,
) -> int:
    """Export runs that have ended to a tracker, offline: nothing is sent anywhere.

    Exporting again adds what is new and leaves the rest alone. Exit code 1 if a run was left out.

    Args:
        run_or_experiment: A folder, an experiment's name, or the beginning of a run's name.
        to: The tracker; each is an extra, as in pip install 'workbench[wandb]'.
        project: The tracker's project, above the experiment.
        folder: Gets the tracker's files; by default runs/exports/<tracker> of the experiment.
    """
    runs = look_up(run_or_experiment).opened()
    exported = export_runs(runs, to=to, project=project, folder=folder)
    print_lines(lines_of(exported))
    where = folder or default_folder(runs[0], to)
    if any(run.outcome != "left out" for run in exported):
        print_lines([f"to look at it: {TRACKERS[to].look.format(folder=where, project=project)}"])
    return 1 if any(run.outcome == "left out" for run in exported) else 0


def main(arguments: Sequence[str]) -> int:
    """Run `workbench export`."""
    return tyro.cli(_export, args=list(arguments), prog="workbench export")
