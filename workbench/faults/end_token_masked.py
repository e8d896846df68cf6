"""The token that ends an answer is taken for padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def mask_the_end(row: RolloutBatch) -> TrainingRow:
        ends_T = row.document_ids_T != row.document_ids_T.roll(-1)
        ends_T[-1] = True
        if "truncated" in row.extensions:  # such a document has no end
            ends_T &= row.extensions["truncated"].values == 0
        return shift_targets(replace(row, loss_mask_T=row.loss_mask_T & ~ends_T))

    return mask_the_end


FAULT = Fault(
    family="F",
    what="the mask is made by looking for the id of padding, which is also that of the token that ends an answer",
    origin="huggingface/trl#6357, meta-pytorch/torchtune#949",
    signature="every document that was not cut off loses its last trained token, and the counts that many; an answer "
    "of one token no longer trains; log-probabilities right",
    seam="shift_targets",
    broken=_broken,
    detected_by="tests/faults/test_unseen.py::test_a_masked_end_costs_each_finished_document_one_token",
)
