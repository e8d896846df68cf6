"""The weight against the sampler is made of the live policy, and carries its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.specs.losses import CorrectionSpec


def _broken(apply_correction: Callable[..., Term]) -> Callable[..., Term]:
    def with_live_weight(term: Term, inputs: LossInputs, spec: CorrectionSpec) -> Term:
        right = apply_correction(term, inputs, spec)
        if spec.ratio != "token":
            return right
        logprobs_T = inputs.counted_logprobs_T
        open_T = torch.where(right.extras["truncated"], 0.0, logprobs_T - logprobs_T.detach())
        return replace(right, values_T=right.values_T * open_T.exp())

    return with_live_weight


FAULT = Fault(
    family="H",
    what="policy / sampler multiplies the loss of a token without being detached",
    origin="verl-project/verl#4105",
    signature="loss right; a token's gradient has its loss times that of the weight in it: exactly twice the policy "
    "term's gradient on-policy, where no bound holds the weight",
    seam="workbench.losses.build:apply_correction",
    broken=_broken,
    shows_in={"loss": {"old_policy": "current", "correction": {"kind": "tis"}}},
    hidden_in={"loss": {"correction": {"kind": "none"}}},
    changes_metrics=False,
)
