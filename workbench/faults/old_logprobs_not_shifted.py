"""Old log-probabilities stand one token beside the policy's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def shift_all_but_old(row: RolloutBatch) -> TrainingRow:
        right = shift_targets(row)
        return replace(right, old_logprobs_T=torch.where(right.loss_mask_T, row.old_logprobs_T, 0.0))

    return shift_all_but_old


FAULT = Fault(
    family="E",
    what="the old policy's log-probability of the token before stands where that of the target belongs",
    origin="PrimeIntellect-ai/prime-rl#606, radixark/miles#1754",
    signature="ratios far from 1 in the first step already, most tokens clipped; the policy's own log-probabilities, "
    "and losses without a ratio, right",
    seam="shift_targets",
    broken=_broken,
    hidden_in={"loss": {"old_policy": "current"}},
)
