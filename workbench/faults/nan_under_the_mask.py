"""Log-probabilities of tokens that do not count are NaN, and the mask comes after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.rollouts.targets import TrainingRow


def _broken(loss_inputs: Callable[..., LossInputs]) -> Callable[..., LossInputs]:
    def inputs_with_nan(row: TrainingRow, said: TokenLogprobs, *more: object) -> LossInputs:
        unscored_T = torch.where(row.loss_mask_T, said.logprobs_T, said.logprobs_T * torch.nan)
        return replace(loss_inputs(row, said, *more), policy_logprobs_T=unscored_T)

    return inputs_with_nan


FAULT = Fault(
    family="F",
    what="what is computed for prompts and padding is NaN and is masked afterwards: backward multiplies NaN by 0",
    origin="verl-project/verl#2377, NovaSky-AI/SkyRL#1635, PrimeIntellect-ai/prime-rl#808",
    signature="every gradient, and its norm, NaN; loss and metrics of tokens right (the loss NaN too where the mask "
    "is a factor)",
    seam="loss_inputs",
    broken=_broken,
    changes_metrics=False,
)
