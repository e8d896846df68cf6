"""What an environment wrote between two turns trains like what the policy wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def train_all_that_follows(row: RolloutBatch) -> TrainingRow:
        mask_T = row.loss_mask_T.clone()
        for number in row.document_ids_T[mask_T].unique().tolist():
            places = (mask_T & (row.document_ids_T == number)).nonzero()[:, 0]
            mask_T[int(places[0]) : int(places[-1]) + 1] = True
        return shift_targets(replace(row, loss_mask_T=mask_T))

    return train_all_that_follows


FAULT = Fault(
    family="F",
    what="the mask of a fused loss is that of the completion: tokens of tools and users inside it are not taken out",
    origin="huggingface/trl#4975 (tool_mask in the Liger path)",
    signature="the holes of a mask train too, and are counted: documents of one turn are right but for the count, "
    "those with holes gain tokens; log-probabilities right",
    seam="shift_targets",
    broken=_broken,
    detected_by="tests/faults/test_unseen.py::test_an_ignored_tool_mask_fills_the_holes",
)
