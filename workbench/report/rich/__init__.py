"""Notebook output of the package's types. The plain-text counterpart of each is its own ``repr``.

Batches, plans and specs are in layers below this one and do not import it: their formatters are registered in IPython
by type name, and nothing is imported before the first one is shown.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

DRAWN = {
    ("workbench.rollouts.batch", "RolloutBatch"): "workbench.report.rich.batch:batch_html",
    ("workbench.sharding.plan", "ShardPlan"): "workbench.report.rich.ranks:plan_html",
    ("workbench.sharding.bridge.traffic", "Traffic"): "workbench.report.rich.ranks:traffic_html",
    ("workbench.specs.run", "RunSpec"): "workbench.report.rich.runs:spec_html",
    ("workbench.launch.ablation", "AblationSpec"): "workbench.report.rich.runs:ablation_html",
    ("workbench.records.directory", "RunDirectory"): "workbench.report.rich.runs:run_html",
    ("workbench.launch.sweep", "Sweep"): "workbench.report.rich.runs:sweep_html",
    ("workbench.compare.comparison", "Comparison"): "workbench.report.summary:as_html",
    ("workbench.systems.explanations", "Explanation"): "workbench.report.rich.verdicts:explanation_html",
    ("workbench.prove.proof", "Proof"): "workbench.report.rich.verdicts:proof_html",
    ("workbench.diagnose.diagnosis", "Diagnosis"): "workbench.report.rich.verdicts:diagnosis_html",
    ("workbench.compare.certificates", "CertificateComparison"): "workbench.report.rich.verdicts:certificates_html",
    ("workbench.compare.bisect", "Bisection"): "workbench.report.rich.verdicts:bisection_html",
}
"""(module, type) -> function that draws it."""


def register(ipython: Any) -> None:
    """Register the formatters in an IPython shell, from ``IPython.get_ipython()``."""
    formatter = ipython.display_formatter.formatters["text/html"]
    for (module, name), place in DRAWN.items():
        formatter.for_type_by_name(module, name, functools.partial(_draw, place))


def as_html(value: Any) -> str:
    """Return a value of one of these types as an HTML fragment with scoped style.

    Raises:
        TypeError: there is no drawing of such a value.
    """
    for kind in type(value).__mro__:
        if (place := DRAWN.get((kind.__module__, kind.__name__))) is not None:
            return _draw(place, value)
    raise TypeError(f"no drawing of a {type(value).__name__}; there are: {', '.join(name for _, name in DRAWN)}")


def _draw(place: str, value: Any) -> str:
    module, _, name = place.partition(":")
    return str(getattr(importlib.import_module(module), name)(value))
