"""A mean over no tokens."""

from __future__ import annotations

from collections.abc import Callable

from workbench.faults import Fault
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.rollouts.targets import TrainingRow


def _broken(loss_inputs: Callable[..., LossInputs]) -> Callable[..., LossInputs]:
    def scaled_in_the_head(row: TrainingRow, said: TokenLogprobs, *more: object) -> LossInputs:
        count = row.loss_mask_T.sum()
        # The head divides by the count and the loss multiplies with it: 1, or 0 / 0.
        return loss_inputs(row, said._replace(logprobs_T=said.logprobs_T * (count / count)), *more)

    return scaled_in_the_head


FAULT = Fault(
    family="F",
    what="what goes back into the head is divided by the trained tokens of the micro-batch, of which there are none",
    origin="surogate#74, NVIDIA-NeMo/Automodel#3796 (fused heads)",
    signature="one such micro-batch, or shard of one, makes every gradient and every norm NaN; the loss is right where "
    "the mask selects, NaN where it multiplies; with a trained token everywhere nothing changes",
    seam="loss_inputs",
    broken=_broken,
    shows_in={"data": {"micro_batches": 10}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_an_empty_micro_batch_makes_gradients_nan",
    changes_metrics=False,
)
