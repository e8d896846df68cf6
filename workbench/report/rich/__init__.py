"""Notebook output of the package's types. The plain-text counterpart of each is its own ``repr``.

Batches, plans and specs are in layers below this one and do not import it: their formatters are registered in IPython
by type name, and nothing is imported before the first one is shown.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

DRAWN = {
    ("workbench.rollouts.batch", "RolloutBatch"): "workbench.report.rich.batch",
    ("workbench.sharding.plan", "ShardPlan"): "workbench.report.rich.plan",
    ("workbench.sharding.bridge.traffic", "Traffic"): "workbench.report.rich.traffic",
    ("workbench.specs.run", "RunSpec"): "workbench.report.rich.spec",
    ("workbench.launch.ablation", "AblationSpec"): "workbench.report.rich.ablation",
    ("workbench.records.directory", "RunDirectory"): "workbench.report.rich.run",
    ("workbench.launch.sweep", "Sweep"): "workbench.report.rich.sweep",
    ("workbench.compare.comparison", "Comparison"): "workbench.report.show",
    ("workbench.systems.explanations", "Explanation"): "workbench.report.rich.explanation",
    ("workbench.prove.proof", "Proof"): "workbench.report.rich.proof",
    ("workbench.diagnose.diagnosis", "Diagnosis"): "workbench.report.rich.diagnosis",
    ("workbench.compare.certificates", "CertificateComparison"): "workbench.report.rich.certificates",
    ("workbench.compare.bisect", "Bisection"): "workbench.report.rich.bisection",
}
"""(module, type) -> module whose ``as_html`` draws it."""


def register(ipython: Any) -> None:
    """Register the formatters in an IPython shell.

    Args:
        ipython: the result of ``IPython.get_ipython()``.
    """
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
    return str(importlib.import_module(place).as_html(value))
