"""A second way to the loss does not pass by the auxiliary one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term


def _broken(mean_squared_logit: Callable[..., Term]) -> Callable[..., Term]:
    def nothing(inputs: LossInputs, coefficient: float) -> Term:
        term = mean_squared_logit(inputs, coefficient)
        return replace(term, values_T=torch.zeros_like(term.values_T))

    return nothing


FAULT = Fault(
    family="K",
    what="a fused loss returns before the line that adds the auxiliary loss (of a router; here of the size of logits), "
    "and nothing says so",
    origin="huggingface/trl#7009",
    signature="loss and gradient are exactly those of the other terms; the auxiliary term is reported as 0",
    seam="workbench.losses.build:mean_squared_logit",
    broken=_broken,
    shows_in={"loss": {"mean_squared_logit_coefficient": 0.5}},
    hidden_in={"loss": {"mean_squared_logit_coefficient": 0.0}},
    detected_by="tests/faults/test_unseen.py::test_a_dropped_auxiliary_loss_leaves_the_other_terms",
)
