"""The last position of a document is trained to predict the first token of the next one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def roll_the_row(row: RolloutBatch) -> TrainingRow:
        right, ids_T = shift_targets(row), row.document_ids_T
        ends_T = torch.zeros_like(row.loss_mask_T)
        ends_T[:-1] = (ids_T[1:] != ids_T[:-1]) & (ids_T[1:] != PADDING)
        ends_T &= row.loss_mask_T
        mask_T = right.loss_mask_T | ends_T
        lengths_T = torch.bincount(ids_T - PADDING, weights=mask_T.double())[ids_T - PADDING].clamp_min(1)
        # What else is known of the label that is too many is that of the document's last token.
        values = {
            name: torch.where(ends_T, getattr(row, name), values_T)
            for name in ("advantages_T", "old_logprobs_T", "sampler_logprobs_T", "ref_logprobs_T")
            if (values_T := getattr(right, name)) is not None
        }
        return replace(
            right,
            **values,
            loss_mask_T=mask_T,
            lengths_T=lengths_T,
            targets_T=torch.where(ends_T, row.tokens_T.roll(-1), right.targets_T),
            source_T=torch.where(ends_T, row.source_T.roll(-1), right.source_T),
        )

    return roll_the_row


FAULT = Fault(
    family="E",
    what="targets are rolled over the whole packed row, and ends of documents are not masked",
    origin="pytorch/torchtitan#4075, the roll of the flat mask in verl-project/verl's SFT (1dda039b: read, not run)",
    signature="one target too many for each document that others follow in its row: its last position; the count of "
    "trained tokens grows by as many. Invisible where every document has a row of its own",
    seam="shift_targets",
    broken=_broken,
    hidden_in={"data": {"micro_batches": 10}},
)
