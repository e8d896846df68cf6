"""The engine's mean over context-parallel ranks is undone for the loss, and not for what goes past it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.reduction.document_sums import ShardedSums


def _broken(squared_logit: Callable[..., Term]) -> Callable[..., Term]:
    def slip_past_the_factor(inputs: LossInputs, coefficient: float) -> Term:
        term, cp = squared_logit(inputs, coefficient), cast(ShardedSums, inputs.document_sums).axis.size
        values_T = term.values_T
        return replace(term, values_T=values_T + (1 / cp - 1) * (values_T - values_T.detach()))

    return slip_past_the_factor


FAULT = Fault(
    family="K",
    what="the gradient of an auxiliary loss (of a router; here of the log-normaliser) is injected behind the place "
    "where the loss is multiplied by cp, and divided by cp with all others",
    origin="NVIDIA/Megatron-LM#1652 and #5047",
    signature="loss right; the auxiliary part of the gradient exactly 1 / cp of the right one, the policy's right",
    seam="workbench.losses.build:squared_logit",
    broken=_broken,
    shows_in={"layout": {"cp": 2}, "loss": {"squared_logit_coefficient": 0.05}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_an_auxiliary_gradient_is_one_over_cp_of_itself",
    changes_metrics=False,
)
