"""The mask is moved with the inputs, not with the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.faults import Fault
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow


def _broken(shift_targets: Callable[[RolloutBatch], TrainingRow]) -> Callable[[RolloutBatch], TrainingRow]:
    def shift_all_but_mask(row: RolloutBatch) -> TrainingRow:
        inside_T = row.document_ids_T == row.document_ids_T.roll(1)
        inside_T[0] = False
        return shift_targets(replace(row, loss_mask_T=row.loss_mask_T.roll(1) & inside_T))

    return shift_all_but_mask


FAULT = Fault(
    family="E",
    what="a target trains where the token before it should: the first token of each answer is lost, and what follows "
    "a run of trained tokens is won",
    origin="verl-project/verl#3287",
    signature="each unbroken run of trained tokens loses its first and wins the token after it, if its document has "
    "one; log-probabilities of those that stay right; loss and gradient wrong by no constant",
    seam="shift_targets",
    broken=_broken,
    detected_by="tests/faults/test_unseen_at_first.py::test_a_mask_one_late_trains_the_token_after_each_trained_one",
)
