"""Targets that were shifted are shifted again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from workbench.faults import Fault
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def shift_and_shift(row: RolloutBatch) -> TrainingRow:
        right, ids_T = shift_targets(row), row.document_ids_T
        inside_T = torch.zeros_like(row.loss_mask_T)
        inside_T[:-1] = ids_T[1:] == ids_T[:-1]

        def again(values_T: Tensor | None, fill: float = 0) -> Tensor | None:
            return None if values_T is None else torch.where(inside_T, values_T.roll(-1), values_T.new_tensor(fill))

        return replace(
            right,
            targets_T=again(right.targets_T),
            loss_mask_T=again(right.loss_mask_T),
            advantages_T=again(right.advantages_T),
            old_logprobs_T=again(right.old_logprobs_T),
            sampler_logprobs_T=again(right.sampler_logprobs_T),
            ref_logprobs_T=again(right.ref_logprobs_T),
            source_T=again(right.source_T, PADDING),
        )

    return shift_and_shift


FAULT = Fault(
    family="E",
    what="data that is lined up with the position before it goes through a loss that does the same: a position is "
    "asked for the token after the next",
    origin="huggingface/transformers#47394 and #46898, radixark/miles#2215 (multi-token prediction)",
    signature="log-probabilities of all tokens wrong, by 0.3 nats in the mean here, and ratios far from 1; the "
    "second token of a document trains no longer; no constant",
    seam="shift_targets",
    broken=_broken,
    detected_by="tests/faults/test_unseen.py::test_targets_shifted_twice_are_those_after_the_next",
)
