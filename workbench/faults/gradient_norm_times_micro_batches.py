"""The norm that is reported, and clipped by, is that of gradients before they are divided by the micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.faults import Fault


def _broken(run_step: Callable) -> Callable:
    def report_undivided(policy: object, loss: object, rows: list, totals: object, **how: object) -> Any:
        result = run_step(policy, loss, rows, totals, **how)
        return replace(result, norms={name: norm * len(rows) for name, norm in result.norms.items()})

    return report_undivided


FAULT = Fault(
    family="C",
    what="the gradient norm is taken before the division by the number of micro-batches, which the optimizer sees",
    origin="NVIDIA-NeMo/RL#1426",
    signature="gradient and loss right; every reported norm exactly micro-batches times too big, and a clip of the "
    "global norm acts that much earlier",
    seam="run_step",
    broken=_broken,
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_reported_norms_are_those_of_undivided_gradients",
    changes_gradient=False,
)
