"""Sweep in its current state: the rows of a panel, static."""

from __future__ import annotations

from workbench.launch.sweep import Sweep
from workbench.report.markup import Markup, tag
from workbench.report.rows import table_of
from workbench.report.trial import TrialReader, elapsed_s


def as_html(sweep: Sweep) -> Markup:
    """Return a row for each run, and how to follow them."""
    trials = [TrialReader(run).read() for run in sweep.runs]
    in_progress = not all(trial.ended for trial in trials)
    hint = tag("p", "As it stood. ", tag("code", "wb.attach(sweep)"), " follows it.", class_="hint")
    return table_of(sweep.experiment_dir.name, trials, elapsed_s(trials), more=hint if in_progress else None)
