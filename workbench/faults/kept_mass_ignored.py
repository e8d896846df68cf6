"""The sampler drew from a cut distribution, and the trainer compares with the whole one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow

KEPT_MASS = 0.9


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def shift_with_renormalised(row: RolloutBatch) -> TrainingRow:
        right = shift_targets(row)
        if right.sampler_logprobs_T is None:
            return right
        kept_T = right.sampler_logprobs_T - math.log(KEPT_MASS)
        return replace(right, sampler_logprobs_T=torch.where(right.loss_mask_T, kept_T, 0.0))

    return shift_with_renormalised


FAULT = Fault(
    family="G",
    what=f"the sampler's log-probabilities are over the tokens that top-p keeps ({KEPT_MASS} of the mass, for every "
    "token), the trainer's over the whole vocabulary",
    origin="huggingface/trl#6789 and #7269, NovaSky-AI/SkyRL#877, vllm-project/vllm#42259",
    signature="every weight against the sampler, and with it the policy term and its gradient, exactly the kept mass "
    "times the right one, cosine 1; other terms right, and everything without such a weight",
    seam="shift_targets",
    broken=_broken,
    shows_in={"loss": {"correction": {"kind": "importance_sampling"}}},
    hidden_in={"loss": {"correction": {"kind": "none"}}, "record": {"metrics": "none"}},
)
