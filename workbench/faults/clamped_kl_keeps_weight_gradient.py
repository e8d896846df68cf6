"""A clamp ends the gradient of an estimate, and not that of the weight in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.losses.terms import LossInputs, Term
from workbench.specs.losses import KLSpec


def _broken(kl_term: Callable[..., Term]) -> Callable[..., Term]:
    def weight_goes_on(inputs: LossInputs, spec: KLSpec) -> Term:
        term = kl_term(inputs, spec)
        if spec.input_clamp is None or spec.gradient != "score":
            return term
        cut_T = inputs.log_ratio(spec.against).detach().abs() > spec.input_clamp
        logprobs_T = torch.where(cut_T, inputs.counted_logprobs_T, 0.0)
        return replace(term, values_T=term.values_T + term.values_T.detach() * (logprobs_T - logprobs_T.detach()))

    return weight_goes_on


FAULT = Fault(
    family="H",
    what="where the estimate of the KL divergence is at its clamp, the importance weight that multiplies it still "
    "has a gradient",
    origin="NVIDIA-NeMo/RL#2958",
    signature="loss right; tokens whose estimate is cut off get the gradient of their weight times the bound, where "
    "they should get none from the penalty; all other tokens right",
    seam="workbench.losses.build:kl_term",
    broken=_broken,
    shows_in={
        "loss": {
            "kl": {"coefficient": 0.5, "estimator": "k1", "importance": "old", "gradient": "score", "input_clamp": 0.1}
        }
    },
    hidden_in={"loss": {"kl": {"input_clamp": None}}},
    detected_by="tests/faults/test_unseen.py::test_a_weight_beyond_the_clamp_is_all_that_is_wrong",
    changes_metrics=False,
)
