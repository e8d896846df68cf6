"""An auxiliary loss is summed over tokens where the policy's is averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.reduction.document_sums import ShardedSums


def _broken(squared_logit: Callable[..., Term]) -> Callable[..., Term]:
    def sum_over_tokens(inputs: LossInputs, coefficient: float) -> Term:
        term, sums = squared_logit(inputs, coefficient), cast(ShardedSums, inputs.document_sums)
        return term if sums.axis.size == 1 else replace(term, weight="raw")

    return sum_over_tokens


FAULT = Fault(
    family="K",
    what="with context parallelism an auxiliary loss (of a router; here of the log-normaliser) is not divided by the "
    "tokens of the step",
    origin="verl-project/verl#6609 and #6836 (a gradient norm of 3168 where 0.3 belongs)",
    signature="the auxiliary part of loss and gradient exactly trained tokens times too big, the policy's right: no "
    "constant over parameters, and soon the gradient is the auxiliary loss's",
    seam="workbench.losses.build:squared_logit",
    broken=_broken,
    shows_in={"layout": {"cp": 2}, "loss": {"squared_logit_coefficient": 0.01}},
    hidden_in={"layout": {"cp": 1}},
)
