"""What the sampler said is lined up with tokens, what the trainer says with positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def shift_all_but_sampler(row: RolloutBatch) -> TrainingRow:
        right = shift_targets(row)
        if row.sampler_logprobs_T is None:
            return right
        return replace(right, sampler_logprobs_T=torch.where(right.loss_mask_T, row.sampler_logprobs_T, 0.0))

    return shift_all_but_sampler


FAULT = Fault(
    family="E",
    what="log-probabilities that came with the rollout stand one token after those that the trainer computes",
    origin="modelscope/ms-swift#8196 (rollout_per_token_logps against old_per_token_logps)",
    signature="weights against the sampler far from 1, many at their bound, and with them the policy term; ratios "
    "against the old policy, the penalty and log-probabilities right",
    seam="shift_targets",
    broken=_broken,
    shows_in={"loss": {"correction": {"kind": "tis"}}},
    hidden_in={"loss": {"correction": {"kind": "none"}}, "record": {"metrics": "none"}},
    detected_by="tests/faults/test_unseen.py::test_other_logprobs_of_the_sampler_move_weights_and_the_policy_term",
)
