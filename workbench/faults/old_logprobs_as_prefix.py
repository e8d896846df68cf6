"""Recorded log-probabilities, one for each trained token, are put at the end of the document after zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def shift_with_prefix(row: RolloutBatch) -> TrainingRow:
        old_T = torch.zeros_like(row.old_logprobs_T)
        for number in range(row.num_documents):
            mine = torch.nonzero(row.document_ids_T == number).squeeze(1)
            trained = mine[row.loss_mask_T[mine]]
            old_T[mine[len(mine) - len(trained) :]] = row.old_logprobs_T[trained]
        return shift_targets(replace(row, old_logprobs_T=old_T))

    return shift_with_prefix


FAULT = Fault(
    family="E",
    what="old log-probabilities are padded by zeros in front, though turns of others stand between the trained ones",
    origin="ServiceNow/PipelineRL (old_logprobs under interleaved labels: read, not run)",
    signature="right where a document trains to its end without a hole; elsewhere early trained tokens have the "
    "probability 1 and later ones another token's, so ratios are far from 1 in the first step already; the "
    "policy's own log-probabilities right",
    seam="shift_targets",
    broken=_broken,
    hidden_in={"loss": {"old_policy": "current"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_a_prefix_of_zeros_spares_documents_without_holes",
)
