"""Known bugs: micro-batches and accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workbench.faults import fault
from workbench.policy.model import Policy
from workbench.reduction.weights import TokenWeights
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.sharding.gradients import sum_gradients


@fault(
    seam="pack_step",
    origin="tenstorrent/tt-metal#46412 and #46548",
    signature="a gradient of about the right size in another direction, right log-probabilities and ratios, a wrong "
    "loss; nothing where one micro-batch takes the documents as they come",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_advantages_of_others_keep_the_size_and_turn",
)
def advantages_of_other_documents(pack_step: Callable) -> Callable:
    """Documents are dealt into micro-batches by length, their advantages in the order in which they came.

    Tokens and advantages are cut into micro-batches along different orders: a document trains on the advantage of
    another.
    """

    def pack_tokens_only(batch: RolloutBatch, *args: object) -> list[RolloutBatch]:
        own_N = _of_documents(batch)
        rows = pack_step(batch, *args)
        return [
            replace(row, advantages_T=advantages_T)
            for row, advantages_T in zip(rows, _in_order_of_arrival(batch, own_N, rows), strict=True)
        ]

    return pack_tokens_only


def _of_documents(batch: RolloutBatch) -> Tensor:
    """[N] the advantage of each document's last trained token; 0 if it has none."""
    own_N = batch.advantages_T.new_zeros(batch.num_documents)
    own_N[batch.document_ids_T[batch.loss_mask_T]] = batch.advantages_T[batch.loss_mask_T]
    return own_N


def _in_order_of_arrival(batch: RolloutBatch, own_N: Tensor, rows: Sequence[RolloutBatch]) -> list[Tensor]:
    """[T] for each row: what stands there, except on documents that are not where they arrived."""
    document_S = torch.full((int(batch.source_T.max()) + 1,), PADDING)
    document_S[batch.source_T] = batch.document_ids_T
    found, packed = [], 0
    for row in rows:
        advantages_T = row.advantages_T.clone()
        for number in range(row.num_documents):
            mine_T = row.document_ids_T == number
            if int(document_S[row.source_T[mine_T][0]]) != packed:
                advantages_T[mine_T] = own_N[packed]
            packed += 1
        found.append(advantages_T)
    return found


@fault(
    seam="run_step",
    origin="modelscope/FunASR#3472",
    signature="loss and metrics right; ranks disagree, and each has what all found in the first micro-batch and only "
    "what it found itself in others: smaller, in another direction; nothing with one micro-batch",
    shows_in={"layout": {"dp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen.py::test_later_micro_batches_of_other_ranks_are_lost",
    changes_metrics=False,
)
def first_micro_batch_synchronised(run_step: Callable) -> Callable:
    """Gradients are summed over ranks after the first micro-batch, and those of later ones stay where they are.

    The condition that leaves out the sum over ranks, but for the last micro-batch, is off by one: it is made after the
    first, and each rank steps with later gradients of its own.
    """

    def sum_the_first(policy: Policy, *args: object, **how: object) -> Any:
        first: dict[Tensor, Tensor] = {}

        def lose_later_ones(parameter: Tensor) -> None:
            if parameter in first:
                parameter.grad.copy_(first[parameter])
            else:
                first[parameter] = parameter.grad.clone()

        # The step that is looked at is the first rank's: all ranks' first gradients, and its own later ones.
        elsewhere = policy.mesh["dp_cp"].rank > 0
        hooks = [
            parameter.register_post_accumulate_grad_hook(lose_later_ones)
            for parameter in policy.model.parameters()
            if elsewhere
        ]
        try:
            return run_step(policy, *args, **how)
        finally:
            for hook in hooks:
                hook.remove()

    return sum_the_first


@fault(
    seam="prepare_rows",
    origin="modelscope/ms-swift#10096, verl-project/verl#3332 and #3994, PrimeIntellect-ai/prime-rl#2424",
    signature="every gradient exactly 1 / micro-batches of the right one, cosine 1; the reported loss is right",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_averaging_over_micro_batches_is_one_factor",
    changes_metrics=False,
)
def gradient_averaged_over_micro_batches(prepare_rows: Callable) -> Callable:
    """The loss of a micro-batch is divided by their number, though its weights are those of the step.

    The trainer divides each loss by the number of accumulated micro-batches before backward, and the loss was divided
    by the tokens of the whole step already.
    """

    def prepare_and_average(*args: object) -> tuple:
        rows, totals = prepare_rows(*args)
        averaged = [
            replace(
                local,
                weights={
                    name: TokenWeights(weights.loss_T, weights.gradient_T / len(rows))
                    for name, weights in local.weights.items()
                },
            )
            for local in rows
        ]
        return averaged, totals

    return prepare_and_average


@fault(
    seam="run_step",
    origin="NVIDIA-NeMo/RL#1426",
    signature="gradient and loss right; every reported norm exactly micro-batches times too big, and a clip of the "
    "global norm acts that much earlier",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_reported_norms_are_those_of_undivided_gradients",
    changes_gradient=False,
)
def gradient_norm_times_micro_batches(run_step: Callable) -> Callable:
    """The gradient norm is taken before the division by the number of micro-batches, which the optimizer sees."""

    def report_undivided(policy: object, loss: object, rows: list, totals: object, **how: object) -> Any:
        result = run_step(policy, loss, rows, totals, **how)
        return replace(result, norms={name: norm * len(rows) for name, norm in result.norms.items()})

    return report_undivided


@fault(
    seam="workbench.policy.model:Policy.hidden_states",
    origin="ServiceNow/Fast-LLM#551 (shared buffers without sharding), a zero_grad inside the loop",
    signature="loss and metrics right; the gradient is that of the last micro-batch alone: smaller, in another "
    "direction",
    shows_in={"data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_only_the_last_micro_batch_trains",
    changes_metrics=False,
)
def gradients_of_last_micro_batch(hidden_states: Callable) -> Callable:
    """Gradients are copied into the buffer that they are to be added to."""

    def start_anew(policy: Policy, *args: object) -> object:
        policy.model.zero_grad(set_to_none=True)
        return hidden_states(policy, *args)

    return start_anew


@fault(
    seam="workbench.policy.model:Policy.hidden_states",
    origin="NVIDIA-NeMo/RL#3660 (a reduction for every chunk of a split step)",
    signature="micro-batch k of K counts N^(K-1-k) times over N ranks of dp x cp: between 1 and N^(K-1) times too big "
    "and turned towards the first micro-batch; loss right",
    shows_in={"layout": {"dp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_denominators_and_metrics.py::test_early_micro_batches_are_summed_again",
    changes_metrics=False,
)
def reduction_repeated_per_micro_batch(hidden_states: Callable) -> Callable:
    """Accumulated gradients are summed over ranks after every micro-batch.

    The sum over ranks runs once a micro-batch on a buffer that accumulates, so early micro-batches are summed again and
    again.
    """

    def sum_before_the_next(policy: Policy, *args: object) -> object:
        if any(parameter.grad is not None for parameter in policy.model.parameters()):
            sum_gradients(policy.model, policy.shards, policy.mesh)
        return hidden_states(policy, *args)

    return sum_before_the_next
