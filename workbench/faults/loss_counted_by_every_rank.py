"""Every cp rank reports the whole loss, and the reports are added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.faults import Fault
from workbench.reduction.evaluate import Evaluated


def _broken(evaluate_loss: Callable) -> Callable:
    def report_too_much(loss: object, inputs: Any, *more: object) -> Evaluated:
        found = evaluate_loss(loss, inputs, *more)
        ranks = inputs.sums.axis.size
        # What is added carries no gradient.
        return found._replace(
            scalars={
                name: replace(scalar, value=scalar.value + (ranks - 1) * scalar.value.detach())
                for name, scalar in found.scalars.items()
            }
        )

    return report_too_much


FAULT = Fault(
    family="B",
    what="a loss that is complete on every context-parallel rank is summed over them once more to be reported",
    origin="ServiceNow/Fast-LLM#520 (the GSPO loss under sequence data parallelism)",
    signature="the reported loss and each of its terms exactly cp times too big; gradients and metrics of tokens right",
    seam="evaluate_loss",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
    changes_gradient=False,
)
