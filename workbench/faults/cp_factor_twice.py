"""The loss is multiplied by cp, and the engine no longer averages."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.reduction.scaling import Cut


def _broken(step_weights: Callable) -> Callable:
    def multiply_again(rows: list, spec: object, cut: Cut | None = None, **how: object) -> tuple:
        weights, totals = step_weights(rows, spec, cut=cut, **how)
        cp = 1 if cut is None else cut.cp
        return [{name: pair.map(lambda w_T: w_T * cp) for name, pair in named.items()} for named in weights], totals

    return multiply_again


FAULT = Fault(
    family="B",
    what="the factor that undoes a mean over context-parallel ranks stays in the loss where their gradients are summed",
    origin="NovaSky-AI/SkyRL#1751 (after the opposite mistake, #1420)",
    signature="loss and every gradient exactly cp times the right ones, cosine 1; metrics of tokens right",
    seam="step_weights",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_factor_of_the_layout_is_one_factor",
)
