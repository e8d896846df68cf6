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
from workbench.specs.losses import LossSpec


@fault(
    seam="pack_step",
    origin="tenstorrent/tt-metal#46412 and #46548",
    signature="a gradient of about the right size in another direction, right log-probabilities and ratios, a wrong "
    "loss; no effect if one micro-batch takes the documents in order",
    needs="micro_batches",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_advantages_of_others_keep_the_size_and_turn",
)
def advantages_of_other_documents(pack_step: Callable, batch: RolloutBatch, *args: object) -> list[RolloutBatch]:
    """Documents are assigned to micro-batches by length, their advantages in order of arrival."""
    own_N = _of_documents(batch)
    rows = pack_step(batch, *args)
    return [
        replace(row, advantages_T=advantages_T)
        for row, advantages_T in zip(rows, _in_order_of_arrival(batch, own_N, rows), strict=True)
    ]


def _of_documents(batch: RolloutBatch) -> Tensor:
    """[N] the advantage of each document's last trained token; 0 if it has none."""
    own_N = batch.advantages_T.new_zeros(batch.num_documents)
    own_N[batch.document_ids_T[batch.loss_mask_T]] = batch.advantages_T[batch.loss_mask_T]
    return own_N


def _in_order_of_arrival(batch: RolloutBatch, own_N: Tensor, rows: Sequence[RolloutBatch]) -> list[Tensor]:
    """[T] advantages of each row, those of other documents for documents that are out of order."""
    document_S = torch.full((int(batch.source_T.max()) + 1,), PADDING)
    document_S[batch.source_T] = batch.document_ids_T
    advantages, packed = [], 0
    for row in rows:
        advantages_T = row.advantages_T.clone()
        for number in range(row.num_documents):
            inside_T = row.document_ids_T == number
            if int(document_S[row.source_T[inside_T][0]]) != packed:
                advantages_T[inside_T] = own_N[packed]
            packed += 1
        advantages.append(advantages_T)
    return advantages


@fault(
    seam="run_step",
    origin="modelscope/FunASR#3472",
    signature="loss and metrics right; ranks disagree: each has all ranks' gradient of the first micro-batch and only "
    "its own of the others: smaller, in another direction; no effect with one micro-batch",
    shows_in={"layout": {"dp": 2}, "data": {"micro_batches": 3}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen.py::test_later_micro_batches_of_other_ranks_are_lost",
    changes_metrics=False,
)
def first_micro_batch_synchronised(run_step: Callable, policy: Policy, *args: object, **options: object) -> Any:
    """The condition for the sum over ranks is off by one: it runs after the first micro-batch, not after the last."""
    first: dict[Tensor, Tensor] = {}

    def lose_later_ones(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "the hook runs once the gradient is accumulated"
        if parameter in first:
            gradient.copy_(first[parameter])
        else:
            first[parameter] = gradient.clone()

    # The reported step is the first rank's: all ranks' first gradients, and its own later ones.
    elsewhere = policy.mesh["dp_cp"].rank > 0
    hooks = [
        parameter.register_post_accumulate_grad_hook(lose_later_ones)
        for parameter in policy.model.parameters()
        if elsewhere and parameter.requires_grad
    ]
    try:
        return run_step(policy, *args, **options)
    finally:
        for hook in hooks:
            hook.remove()


@fault(
    seam="prepare_rows",
    origin="modelscope/ms-swift#10096, verl-project/verl#3332 and #3994, PrimeIntellect-ai/prime-rl#2424",
    signature="every gradient exactly 1 / micro-batches of the right one, cosine 1; the reported loss is right",
    needs="micro_batches",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_averaging_over_micro_batches_is_one_factor",
    changes_metrics=False,
)
def gradient_averaged_over_micro_batches(prepare_rows: Callable, *args: object) -> tuple:
    """Each loss is divided by the number of micro-batches, although by the tokens of the whole step already."""
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


@fault(
    seam="run_step",
    origin="NVIDIA-NeMo/RL#1426",
    signature="gradient and loss right; every reported norm exactly micro-batches times too big, and a clip of the "
    "global norm acts that much earlier",
    needs="micro_batches",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_reported_norms_are_those_of_undivided_gradients",
    changes_gradient=False,
)
def gradient_norm_times_micro_batches(
    run_step: Callable, policy: object, loss: object, rows: list, totals: object, **options: object
) -> Any:
    """The gradient norm is computed before gradients are divided by the number of micro-batches."""
    result = run_step(policy, loss, rows, totals, **options)
    return replace(result, norms={name: norm * len(rows) for name, norm in result.norms.items()})


@fault(
    seam="workbench.policy.model:Policy.hidden_states",
    origin="ServiceNow/Fast-LLM#551 (shared buffers without sharding), a zero_grad inside the loop",
    signature="loss and metrics right; the gradient is that of the last micro-batch alone: smaller, in another "
    "direction",
    needs="micro_batches",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_only_the_last_micro_batch_trains",
    changes_metrics=False,
)
def gradients_of_last_micro_batch(hidden_states: Callable, policy: Policy, *args: object) -> object:
    """Gradients are copied into the accumulation buffer instead of added to it."""
    policy.model.zero_grad(set_to_none=True)
    return hidden_states(policy, *args)


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
def reduction_repeated_per_micro_batch(hidden_states: Callable, policy: Policy, *args: object) -> object:
    """Gradients are summed over ranks once per micro-batch, in a buffer that accumulates."""
    if any(parameter.grad is not None for parameter in policy.model.parameters()):
        sum_gradients(policy.model, policy.shards, policy.mesh)
    return hidden_states(policy, *args)


@fault(
    family="A",
    seam="step_weights",
    origin="NVIDIA-NeMo/RL#266 and #373, NovaSky-AI/SkyRL#925 and #1296, TRL's loss type bnpo",
    signature="no factor, another direction: tokens of micro-batches with few trained tokens weigh more; cosine below "
    "1, size near 1. With equal counts it is right",
    needs="micro_batches",
    detected_by="tests/faults/test_denominators_and_metrics.py::test_a_mean_of_means_rotates_the_gradient",
)
def mean_of_micro_batch_means(step_weights: Callable, rows: list, spec: object, **options: object) -> tuple:
    """The loss is a mean over the step's micro-batches of all ranks of means over their own tokens: a mean of means."""
    weights, totals = step_weights(rows, spec, **options)
    for row, named in zip(rows, weights, strict=True):
        alone = step_weights([row], spec)[0][0]
        for name in ("policy", "penalty", "token"):
            named[name] = alone[name].map(lambda weights_T: weights_T / len(rows))
    return weights, totals


@fault(
    family="A",
    seam="step_weights",
    origin="ServiceNow/Fast-LLM#520, docs_per_step: one of two counters is reset to the step's total",
    signature="a sum of means instead of one mean: loss and gradient too big by about the number of micro-batches of "
    "the step, tilted towards those with few trained tokens; no effect with one micro-batch and with denominators that "
    "count documents only",
    needs="micro_batches",
    detected_by="tests/parity/test_faults.py::test_token_counts_of_micro_batches_make_a_mean_of_means",
)
def micro_batch_denominator(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """The token count of a micro-batch is used instead of that of the whole step; the document count is right."""
    weights, totals = step_weights(rows, spec, **options)
    for row, named in zip(rows, weights, strict=True):
        alone = step_weights([row], spec)[0][0]
        # Documents are counted over the whole step, tokens are not.
        for name in ("policy", "penalty", "token"):
            if name == "token" or spec.denominator == "token":
                named[name] = alone[name]
    return weights, totals


@fault(
    family="A",
    seam="step_weights",
    origin="NVIDIA-NeMo/RL#3791 (32 times too big with 32 micro-batches)",
    signature="this term alone wrong, in loss and gradient: about micro-batches (of all ranks) times too big, those "
    "with few such tokens most; other terms right; no effect with one micro-batch",
    shows_in={"data": {"micro_batches": 3}, "loss": {"name": "vapo"}},
    hidden_in={"data": {"micro_batches": 1}},
    detected_by="tests/faults/test_unseen.py::test_a_likelihood_counted_in_micro_batches_is_the_only_wrong_term",
)
def nll_denominator_per_micro_batch(step_weights: Callable, rows: list, spec: LossSpec, **options: object) -> tuple:
    """The likelihood of rewarded completions is averaged over those of each micro-batch, and the means are summed."""
    weights, totals = step_weights(rows, spec, **options)
    for row, named in zip(rows, weights, strict=True):
        alone = step_weights([row], spec)[0][0]
        named |= {name: pair for name, pair in alone.items() if name == "positive_token"}
    return weights, totals
