"""Known bugs: layers in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from workbench.faults import fault
from workbench.policy.model import Policy
from workbench.sharding.gradients import local_values

STAGES = {"layout": {"pp": 2}, "data": {"micro_batches": 2}}
ONE_ROW = {"data": {"micro_batches": 1}}


@fault(
    seam="run_stages",
    origin="torch.distributed.pipelining (scale_grads is True by default) under a loss that is divided already, as in "
    "pytorch/torchtitan#1732",
    signature="every gradient exactly 1 / micro-batches of the right one; loss right",
    shows_in=STAGES,
    hidden_in=ONE_ROW,
    changes_metrics=False,
)
def pipeline_gradients_averaged(run_stages: Callable, policy: Policy, rows: Sequence[Any], *more: Any) -> None:
    """Every stage divides its gradients by the number of micro-batches, though the loss has the counts of the step."""
    run_stages(policy, rows, *more)
    for parameter in policy.model.parameters():
        if parameter.grad is not None:
            local_values(parameter.grad).div_(len(rows))


@fault(
    seam="workbench.sharding.gradients:sum_of_ends",
    origin="no single report: what the all-reduce of word embeddings over both ends is for in NVIDIA/Megatron-LM",
    signature="the embedding lacks the gradient that it gets as the head, and its copy at the other end the rest; all "
    "others and the loss right",
    shows_in={"layout": {"pp": 2}},
    hidden_in={"layout": {"pp": 1}},
    changes_metrics=False,
)
def tied_weight_of_each_end(sum_of_ends: Callable, values: Sequence[Tensor], axis: Any) -> None:
    """The first and the last stage train their copies of a tied weight apart."""


@fault(
    seam="run_stages",
    origin="NVIDIA-NeMo/Automodel#3530 (stages prepared again between micro-batches)",
    signature="loss and metrics right; the gradient is that of the last micro-batch alone: smaller, in another "
    "direction",
    shows_in=STAGES,
    hidden_in=ONE_ROW,
    changes_metrics=False,
)
def stages_prepared_per_micro_batch(
    run_stages: Callable, policy: Policy, rows: Sequence[Any], row_loss: Callable
) -> None:
    """A stage loses its accumulated gradient when it is prepared for the next micro-batch."""

    def of_last_row(local: Any, hidden_TD: Tensor) -> tuple[Tensor, Callable[[], None]]:
        loss, measure = row_loss(local, hidden_TD)
        return loss * float(local is rows[-1]), measure

    run_stages(policy, rows, of_last_row)
