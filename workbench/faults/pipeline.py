"""Known bugs: layers in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from workbench.faults import fault
from workbench.policy.model import Policy
from workbench.sharding.gradients import local_values
from workbench.sharding.mesh import Mesh

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
    _divide(policy, len(rows))


def _divide(policy: Policy, number: int) -> None:
    for parameter in policy.model.parameters():
        if parameter.grad is not None:
            local_values(parameter.grad).div_(number)


@fault(
    seam="run_stages",
    origin="pytorch/torchtitan#1732 and #1733 (gradient accumulation over calls of a schedule with scale_grads)",
    signature="loss right; a moving average: the gradients of each call are divided again by every later one, so that "
    "those of the last call weigh most; smaller, in another direction",
    shows_in={"layout": {"pp": 2}, "data": {"micro_batches": 4}},
    hidden_in=ONE_ROW,
    detected_by="tests/faults/test_pipeline_and_experts.py::test_each_call_of_a_schedule_divides_those_before_again",
    changes_metrics=False,
)
def pipeline_gradients_averaged_per_call(run_stages: Callable, policy: Policy, rows: Sequence[Any], *more: Any) -> None:
    """A schedule that is called for two micro-batches at a time divides all that has been accumulated so far."""
    for first in range(0, len(rows), 2):
        called = rows[first : first + 2]
        run_stages(policy, called, *more)
        _divide(policy, len(called))


@fault(
    seam="run_step",
    origin="pytorch/torchtitan#2972 and #4194",
    signature="every gradient exactly as many times too big as the step has trained tokens, cosine 1; loss right",
    shows_in={"layout": {"pp": 2}},
    hidden_in={"layout": {"pp": 1}},
    detected_by="tests/faults/test_pipeline_and_experts.py::test_a_sum_is_back_propagated_through_stages",
    changes_metrics=False,
)
def pipeline_loss_divided_after_backward(
    run_step: Callable, policy: Policy, loss: object, rows: object, totals: Any, **options: object
) -> object:
    """A schedule back-propagates the sum over tokens; the trainer divides what it reports, when it has returned."""
    if policy.stages is not None:
        totals = replace(totals, scale=totals.scale * totals.tokens)
    return run_step(policy, loss, rows, totals, **options)


@fault(
    seam="workbench.policy.model:split_stages",
    origin="NVIDIA/Megatron-LM#7452, finding 12 (a checkpoint of one number of stages, loaded in another)",
    signature="log-probabilities, loss and gradients of another model: later stages have copies of the first one's "
    "layers, and their own are lost; no error, as all shapes fit",
    shows_in={"layout": {"pp": 2}},
    hidden_in={"layout": {"pp": 1}},
    detected_by="tests/faults/test_pipeline_and_experts.py::test_the_last_stage_has_the_layers_of_the_first",
)
def stage_layers_numbered_locally(split_stages: Callable, model: Any, mesh: Mesh, shards: Mapping, **how: Any) -> Any:
    """Layers are loaded by their number within a stage, which for the first stage alone is that in the model."""
    lists = {name: list(child) for name, child in model.base_model.named_children() if isinstance(child, nn.ModuleList)}
    stages, kept = split_stages(model, mesh, shards, **how)
    if stages is not None:
        layers = lists[stages.list_name]
        own = [number for stage in stages.own for number in stages.layers[stage]]
        loaded = [[value.detach().clone() for value in layers[local].parameters()] for local in range(len(own))]
        for number, values in zip(own, loaded, strict=True):
            for parameter, value in zip(layers[number].parameters(), values, strict=False):
                if parameter.shape == value.shape:
                    parameter.data.copy_(value)
    return stages, kept


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
    run_stages: Callable, policy: Policy, rows: Sequence[Any], row_loss: Callable, *routing: Any
) -> None:
    """A stage loses its accumulated gradient when it is prepared for the next micro-batch."""

    def of_last_row(local: Any, hidden_TD: Tensor) -> tuple[Tensor, Callable[[], None]]:
        loss, measure = row_loss(local, hidden_TD)
        return loss * float(local is rows[-1]), measure

    run_stages(policy, rows, of_last_row, *routing)
