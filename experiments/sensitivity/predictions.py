"""Predictions of survivors from clean runs alone: for records whose measurements are kept while needs are corrected."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from workbench.experiment import Experiment
from workbench.faults import load_fault
from workbench.sensitivity.measure import run_clean
from workbench.sensitivity.trials import Plan, Trials


def predict(experiment: Experiment, configurations: Sequence[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Return the reasons for which each admissible fault is predicted to be hidden; none if it is to be rejected."""
    faults = [load_fault(name) for name in names]
    plans = [Plan(p.name, p.spec, p.reference, p.truth) for p in experiment.planned if not p.spec.faults]
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(plans, Path(folder), experiment.project)
        clean = run_clean(trials, configurations, [fault.seam for fault in faults])
        choices = {fault.name: clean.choose(fault) for fault in faults}
        return {name: [need.missing for need in of.missing] for name, of in choices.items() if of is not None}
