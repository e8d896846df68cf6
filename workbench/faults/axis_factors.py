"""Known bugs: wrong factor of a parallel axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from workbench.faults import fault
from workbench.reduction.evaluate import Evaluated
from workbench.reduction.weights import StepLayout, TokenWeights
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis, Mesh
from workbench.specs.run import RunSpec


@fault(
    seam="gradient_norms",
    origin="NVIDIA-NeMo/RL#1693",
    signature="loss, metrics of tokens and gradients right; every norm exactly 1 / (dp cp) of its gradient's, so that "
    "the clip passes dp cp times the threshold",
    shows_in={"layout": {"dp": 2, "cp": 2}},
    hidden_in={"layout": {"dp": 1, "cp": 1}},
    detected_by="tests/faults/test_unseen_at_first.py::test_norms_of_averaged_gradients_are_too_small_by_the_ranks",
    changes_gradient=False,
)
def clip_of_averaged_gradients(
    gradient_norms: Callable, model: object, shards: Mapping, mesh: Mesh
) -> dict[str, float]:
    """Gradients are clipped while averaged over dp x cp ranks: the effective threshold is dp cp times the setting."""
    return {name: norm / mesh["dp_cp"].size for name, norm in gradient_norms(model, shards, mesh).items()}


@fault(
    seam="step_weights",
    origin="NovaSky-AI/SkyRL#1751 (after the opposite mistake, #1420)",
    signature="loss and every gradient exactly cp times the right ones, cosine 1; metrics of tokens right",
    needs="cp",
    detected_by="tests/faults/test_unseen_at_first.py::test_a_factor_of_the_layout_is_one_factor",
)
def cp_factor_twice(
    step_weights: Callable, rows: list, spec: object, step_layout: StepLayout | None = None, **options: object
) -> tuple:
    """The factor that undoes a mean over context-parallel ranks stays in the loss, but their gradients are summed."""
    weights, totals = step_weights(rows, spec, step_layout=step_layout, **options)
    cp = 1 if step_layout is None else step_layout.cp
    return [{name: pair.map(lambda w_T: w_T * cp) for name, pair in named.items()} for named in weights], totals


@fault(
    seam="step_weights",
    origin="ServiceNow/Fast-LLM#502 (loss 1 / M, gradient 1 / M^2; removed in #517 and #520)",
    signature="every gradient exactly 1 / documents of the right one, cosine 1, loss and metrics of tokens right; a "
    "threshold for the gradient norm no longer clips",
    changes_metrics=False,
)
def gradient_divided_by_documents_again(step_weights: Callable, *args: object, **options: object) -> tuple:
    """Backward divides by the number of documents again, after forward has divided already."""
    weights, totals = step_weights(*args, **options)
    documents = max(totals.documents, 1)
    return [
        {name: TokenWeights(pair.loss_T, pair.gradient_T / documents) for name, pair in named.items()}
        for named in weights
    ], totals


@fault(
    seam="evaluate_loss",
    origin="ServiceNow/Fast-LLM#520 (the GSPO loss under sequence data parallelism)",
    signature="the reported loss and each of its terms exactly cp times too big; gradients and metrics of tokens right",
    needs="cp",
    changes_gradient=False,
)
def loss_counted_by_every_rank(evaluate_loss: Callable, loss: object, inputs: Any, *more: object) -> Evaluated:
    """A loss that is complete on every context-parallel rank is summed over them once more for the report."""
    evaluated = evaluate_loss(loss, inputs, *more)
    ranks = inputs.sums.axis.size
    # The added part is detached: the gradient stays right.
    return evaluated._replace(
        scalars={
            name: replace(scalar, value=scalar.value + (ranks - 1) * scalar.value.detach())
            for name, scalar in evaluated.scalars.items()
        }
    )


@fault(
    seam="step_weights",
    origin="ByteDance-Seed/VeOmni#338 (8 ranks, loss and gradient 8 times too small)",
    signature="loss and every gradient exactly 1 / cp of the right ones, cosine 1; metrics of tokens right",
    needs="cp",
    detected_by="tests/faults/test_unseen.py::test_a_mean_over_sequence_ranks_is_one_factor_in_loss_and_gradient",
)
def loss_divided_by_sequence_ranks(
    step_weights: Callable, rows: list, spec: object, step_layout: StepLayout | None = None, **options: object
) -> tuple:
    """A loss already divided by the tokens of the whole sequence is averaged over the ranks that share it."""
    weights, totals = step_weights(rows, spec, step_layout=step_layout, **options)
    cp = 1 if step_layout is None else step_layout.cp
    return [{name: pair.map(lambda w_T: w_T / cp) for name, pair in named.items()} for named in weights], totals


@fault(
    seam="sum_gradients",
    origin="NVIDIA/Megatron-LM#673, THUDM/slime#987, NovaSky-AI/SkyRL#1420",
    signature="every gradient exactly 1 / cp of the right one, cosine 1, loss right; invisible after one Adam step",
    needs="cp",
    detected_by="tests/parity/test_faults.py::test_missing_cp_factor_halves_every_gradient_and_not_the_loss",
    changes_metrics=False,
)
def missing_cp_factor(sum_gradients: Callable, model: nn.Module, shards: object, mesh: Mesh, *more: object) -> None:
    """Gradients are averaged over context-parallel ranks, each of which has only a part of the sum."""
    sum_gradients(model, shards, mesh, *more)
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, "sum_gradients gives every trained parameter its sum"
            parameter.grad.div_(mesh["cp"].size)


@fault(
    seam="compute_advantages",
    origin="radixark/miles#1720",
    signature="advantages, and with them the policy term, exactly cp times the right ones, the penalty right; no "
    "effect if advantages are divided by a deviation, or at cp = 1",
    shows_in={"layout": {"cp": 2}, "data": {"advantages": {"name": "rloo"}}},
    hidden_in={"layout": {"cp": 1}},
    detected_by="tests/faults/test_unseen.py::test_a_reward_on_every_rank_multiplies_the_policy_term",
)
def reward_on_every_cp_rank(compute_advantages: Callable, batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
    """Every context-parallel rank assigns the reward to a completion's last token, and these are summed."""
    if batch.rewards_N is None:
        return compute_advantages(batch, spec)
    wrong = compute_advantages(replace(batch, rewards_N=batch.rewards_N * spec.layout.cp), spec)
    return replace(wrong, rewards_N=batch.rewards_N)


@fault(
    seam="split_row",
    origin="ServiceNow/Fast-LLM e0d8c4d4 (segment ids that are not the same on all ranks)",
    signature="documents on one rank are right; one that straddles ranks has a ratio per rank, so that other tokens "
    "are clipped; loss and gradient wrong by no constant, and right under a token-level loss",
    shows_in={"layout": {"cp": 3}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"cp": 1}},
)
def sequence_ratio_per_shard(split_row: Callable, *args: object) -> object:
    """Sums and lengths of a document are taken over the local tokens of a context-parallel rank."""
    local = split_row(*args)
    row = local.row
    documents_T = row.document_ids_T - PADDING
    lengths_T = torch.bincount(documents_T, weights=row.loss_mask_T.double())[documents_T].clamp_min(1)
    return replace(local, row=replace(row, lengths_T=lengths_T), sums=replace(local.sums, complete=_keep_partial))


def _keep_partial(partial: Tensor, axis: Axis) -> Tensor:
    return partial


@fault(
    seam="split_row",
    origin="THUDM/slime#695 (e9e42e5e)",
    signature="ratios of documents include tokens of others, and miss own ones: loss and policy gradient wrong by no "
    "constant; right under a loss on tokens, and if shards are contiguous",
    shows_in={"layout": {"cp": 2, "order": "zigzag"}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen_at_first.py::test_wrong_offsets_of_sequence_sums_spare_losses_on_tokens",
)
def sequence_sums_at_wrong_offsets(
    split_row: Callable, row: Any, weights: Any, documents: Any, plan: Any, mesh: Any, layout: Any
) -> Any:
    """A sequence ratio gathers a document's tokens from offsets that are wrong for a zigzag split."""
    local = split_row(row, weights, documents, plan, mesh, layout)
    tokens = len(local.row.tokens_T)
    contiguous_T = torch.arange(tokens) + mesh["cp"].rank * tokens
    return replace(local, sums=replace(local.sums, positions_t=contiguous_T))


@fault(
    seam="prepare_rows",
    origin="a fork of NVIDIA/Megatron-LM (NMFW-17, bridge to cp > 1), after NVIDIA/Megatron-LM#4368",
    signature="loss and gradient about cp times too big; exactly so if all cp ranks have equally many trained tokens, "
    "else tilted towards those with few; no effect at cp = 1",
    needs="cp",
    detected_by="tests/faults/test_unseen.py::test_tokens_counted_over_dp_only_are_cp_times_too_few",
)
def tokens_counted_over_dp_only(prepare_rows: Callable, batch: object, spec: RunSpec, mesh: Mesh, *more: object) -> Any:
    """Each context-parallel rank divides by the tokens of the dp ranks with its own coordinate on the cp axis."""
    rows, totals = prepare_rows(batch, spec, mesh, *more)
    if spec.loss.denominator != "token":
        return rows, totals
    return counted_over_dp(rows, totals, mesh), totals


def counted_over_dp(rows: Sequence[Any], totals: Any, mesh: Mesh) -> list[Any]:
    """Rows whose weights are divided by the trained tokens of the ranks of dp alone."""
    own_tokens = torch.stack([local.row.loss_mask_T.sum() for local in rows]).sum().double()
    counted = float(all_sum(own_tokens, mesh["dp"]))
    factor = totals.tokens / max(counted, 1.0)
    return [
        replace(local, weights={name: pair.map(lambda w_T: w_T * factor) for name, pair in local.weights.items()})
        for local in rows
    ]
