"""Known bugs: masks, NaN, ranks without tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from workbench.errors import SpecError
from workbench.faults import fault
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard


@fault(
    seam="loss_inputs",
    origin="surogate#74, NVIDIA-NeMo/Automodel#3796 (fused heads)",
    signature="one such micro-batch, or shard of one, makes every gradient and every norm NaN; the loss is right if "
    "the mask selects, NaN if it multiplies; no effect if every micro-batch has a trained token",
    shows_in={"data": {"micro_batches": 10}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_an_empty_micro_batch_makes_gradients_nan",
    changes_metrics=False,
)
def empty_micro_batch_divides_by_zero(
    loss_inputs: Callable, row: TrainingRow, head_output: TokenLogprobs, *more: object
) -> LossInputs:
    """The gradient of the head is divided by the trained tokens of the micro-batch, of which there are none."""
    count = row.loss_mask_T.sum()
    # The head divides by the count and the loss multiplies by it: 1, or 0 / 0.
    return loss_inputs(row, head_output._replace(logprobs_T=head_output.logprobs_T * (count / count)), *more)


@fault(
    seam="shift_targets",
    origin="huggingface/trl#6357, meta-pytorch/torchtune#949",
    signature="every document that was not truncated loses its last trained token, which the counts miss; a completion "
    "of one token no longer trains; log-probabilities right",
    detected_by="tests/faults/test_unseen.py::test_a_masked_end_costs_each_finished_document_one_token",
)
def end_token_masked(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """The mask excludes the id of padding, which is also that of the end token of a completion."""
    ends_T = row.document_ids_T != row.document_ids_T.roll(-1)
    ends_T[-1] = True
    if "truncated" in row.extensions:  # truncated documents have no end token
        ends_T &= row.extensions["truncated"].values == 0
    return shift_targets(replace(row, loss_mask_T=row.loss_mask_T & ~ends_T))


@fault(
    seam="loss_inputs",
    origin="verl-project/verl#2377, NovaSky-AI/SkyRL#1635, PrimeIntellect-ai/prime-rl#808",
    signature="every gradient, and its norm, NaN; loss and metrics of tokens right (the loss NaN too if the mask is a "
    "factor)",
    changes_metrics=False,
)
def nan_under_the_mask(
    loss_inputs: Callable, row: TrainingRow, head_output: TokenLogprobs, *more: object
) -> LossInputs:
    """Values of prompts and padding are NaN and are masked afterwards: backward multiplies NaN by 0."""
    logprobs_T = torch.where(row.loss_mask_T, head_output.logprobs_T, head_output.logprobs_T * torch.nan)
    return replace(loss_inputs(row, head_output, *more), policy_logprobs_T=logprobs_T)


@fault(
    seam="sum_gradients",
    origin="THUDM/slime#393 (whitening not entered by all ranks), THUDM/slime#2123 (a rank without tokens skips the "
    "backward)",
    signature="no wrong number: the ranks wait for each other until a time-out, or the backend aborts one of them",
    shows_in={"layout": {"cp": 2}},
    detected_by="tests/parity/test_hangs.py::test_the_rank_that_skipped_a_collective_is_named",
    factory=True,
    changes_gradient=False,
    changes_metrics=False,
)
def skipped_collective(sum_gradients: Callable) -> Callable:
    """In the second step the second rank of dp x cp skips the sum of gradients, one collective if in one bucket."""
    is_chosen = _second_call_of_second_rank()

    def sum_without_one(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh, *more: object) -> None:
        if any(shard.over_dp_cp for shard in shards.values()):
            raise SpecError(
                "fault 'skipped_collective' with layout.shard_parameters",
                found="gradients that backward has summed over dp x cp",
                rule="the fault skips a sum after backward",
                fix="leave out shard_parameters, or the fault",
            )
        sum_gradients(nn.Module() if is_chosen(mesh) else model, shards, mesh, *more)  # it has no parameters

    return sum_without_one


def _second_call_of_second_rank() -> Callable[[Mesh], bool]:
    """A function that is True in the second of its calls on the second rank of dp x cp."""
    calls: Counter[tuple[int, ...]] = Counter()  # simulated ranks share it

    def is_chosen(mesh: Mesh) -> bool:
        place = tuple(mesh.coordinates.values())
        calls[place] += 1
        return calls[place] == 2 and mesh["dp_cp"].rank == 1

    return is_chosen


@fault(
    seam="sum_gradients",
    origin="a slow disk, a compiler, a throttled device",
    signature="no wrong number: the others wait, and the rank is named as the one they wait for",
    shows_in={"layout": {"cp": 2}},
    detected_by="tests/parity/test_hangs.py::test_the_straggler_arrives_late_once",
    factory=True,
    changes_gradient=False,
    changes_metrics=False,
)
def straggler(sum_gradients: Callable) -> Callable:
    """In the second step the second rank of dp x cp enters the sum of gradients 25 s late."""
    is_chosen = _second_call_of_second_rank()

    def sum_late(model: object, shards: object, mesh: Mesh, *more: object) -> None:
        if is_chosen(mesh):
            time.sleep(LATE_S)
        sum_gradients(model, shards, mesh, *more)

    return sum_late


LATE_S = 25.0


@fault(
    seam="shift_targets",
    origin="huggingface/trl#4975 (tool_mask in the Liger path)",
    signature="the holes of a mask train too, and are counted: documents of one turn are right except for the count, "
    "those with holes gain tokens; log-probabilities right",
    detected_by="tests/faults/test_unseen.py::test_an_ignored_tool_mask_fills_the_holes",
)
def tool_mask_ignored(shift_targets: Callable, row: RolloutBatch) -> TrainingRow:
    """The mask of a fused loss is that of the completion, including the tokens of tools and users in it."""
    mask_T = row.loss_mask_T.clone()
    for number in row.document_ids_T[mask_T].unique().tolist():
        places = (mask_T & (row.document_ids_T == number)).nonzero()[:, 0]
        mask_T[int(places[0]) : int(places[-1]) + 1] = True
    return shift_targets(replace(row, loss_mask_T=mask_T))
