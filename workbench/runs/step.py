"""READ THIS FIRST: the whole workbench on one page.

One optimizer step of a policy loss, in any layout:

    pack -> shift targets -> weigh (on the whole step) -> split over cp -> hidden states -> token log-probabilities
    -> per-token loss -> weighted sum -> backward -> sum gradients over dp x cp -> metrics -> optimizer

Everything that looks across tokens happens before the split; everything after it is a plain sum over the tokens
of a rank. The functions of this module are also the seams at which `workbench.runs.faults` plants known bugs.

Letters: T packed tokens | S tokens of the source batch | D model dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.losses import LOSSES, Loss, LossInputs, Term
from workbench.metrics.policy import policy_metrics
from workbench.metrics.values import finish_metrics
from workbench.policy.model import DTYPES, Policy
from workbench.reduction.partial import Scalar
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import StepTotals, step_weights
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.packing import pack
from workbench.rollouts.targets import TrainingRow, shift_targets
from workbench.runs.spec import LossSpec, RunSpec
from workbench.sharding.attention import AttentionShard
from workbench.sharding.collectives import all_gather
from workbench.sharding.gradients import full_gradients, gradient_norms, sum_gradients
from workbench.sharding.mesh import Mesh
from workbench.sharding.plan import ShardPlan, chunks_per_rank


@dataclass(frozen=True)
class LocalRow:
    """One micro-batch as one rank holds it.

    Attributes:
        row: this rank's tokens, in the order of the plan.
        attention: who sees whom, and over which axis keys and values are gathered.
    """

    row: TrainingRow
    attention: AttentionShard


@dataclass(frozen=True)
class StepResult:
    """What one step found; the same on every rank.

    Attributes:
        loss: whole scalars, term by term and "total".
        metrics: finished numbers by key.
        norms: L2 norm of every parameter's whole gradient.
        gradients: every parameter's whole gradient; empty unless asked for.
        tokens: per-token values in the order of the source batch, [S]; empty unless asked for.
        totals: tokens and documents of the whole step.
    """

    loss: Mapping[str, Scalar]
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor]
    totals: StepTotals


def make_loss(spec: LossSpec) -> Loss:
    """The pure loss that a spec names."""
    return functools.partial(LOSSES[spec.name], clip_low=spec.clip_low, clip_high=spec.clip_high,
                             kl_coefficient=spec.kl_coefficient)


def prepare_rows(batch: RolloutBatch, spec: RunSpec, mesh: Mesh) -> tuple[list[LocalRow], StepTotals]:
    """Turn the documents of one optimizer step into this rank's micro-batches.

    Every rank sees the whole step here, so the weights need no collective and cannot be local.
    """
    layout, data = spec.layout, spec.data
    needed = chunks_per_rank(layout.order) * layout.cp if layout.cp > 1 else 1
    rows = pack(batch, rows=layout.dp * data.micro_batches, multiple_of=data.multiple_of or needed)
    whole = [shift_targets(row) for row in rows]
    weights, totals = step_weights(whole, spec.loss.denominator)
    whole = [replace(row, weights_T=weights_T) for row, weights_T in zip(whole, weights, strict=True)]
    first = mesh["dp"].rank * data.micro_batches
    mine = [row.to(mesh.device, DTYPES["float64" if spec.precision == "float64" else "float32"])
            for row in whole[first: first + data.micro_batches]]
    order = layout.order if layout.cp > 1 else "contiguous"
    plans = [ShardPlan.make(order, num_tokens=row.tokens_T.shape[0], cp=layout.cp) for row in mine]
    return [split_row(row, plan, mesh) for row, plan in zip(mine, plans, strict=True)], totals


def split_row(row: TrainingRow, plan: ShardPlan, mesh: Mesh) -> LocalRow:
    """This rank's share of a row: every token-aligned tensor moved by one plan."""
    axis = mesh["cp"]
    return LocalRow(row.map(lambda values_T: plan.split(values_T, axis.rank)),
                    AttentionShard.make(plan, row.document_ids_T, axis))


def run_step(policy: Policy, loss: Loss, rows: list[LocalRow], totals: StepTotals, *, num_source: int = 0,
             frozen_clip_S: Tensor | None = None, keep_gradients: bool = False) -> StepResult:
    """Loss, gradients and metrics of one optimizer step; gradients stay in ``parameter.grad``.

    Args:
        policy: the model as this rank holds it.
        loss: pure per-token loss.
        rows: this rank's micro-batches, from `prepare_rows`.
        totals: of the whole step, from `prepare_rows`.
        num_source: S; if not 0, per-token values are gathered in the order of the source batch.
        frozen_clip_S: [S] bool, clip decisions taken elsewhere.
        keep_gradients: gather every parameter's whole gradient.
    """
    mesh = policy.mesh
    parts, metrics, per_token = [], [], []
    policy.model.zero_grad(set_to_none=True)
    for local in rows:
        row = local.row
        hidden_TD = policy.hidden_states(row.tokens_T, row.positions_T, local.attention)
        logprobs_T, entropy_T = policy.token_logprobs(hidden_TD, row.targets_T)
        # Where nothing counts the ratio is 1, whatever the policy says there: no exp can overflow into a gradient.
        logprobs_T = torch.where(row.loss_mask_T, logprobs_T, row.old_logprobs_T)
        inputs = LossInputs(logprobs_T, row.old_logprobs_T, row.advantages_T, row.sampler_logprobs_T,
                            row.ref_logprobs_T, entropy_T, _at_targets(frozen_clip_S, row))
        terms = loss(inputs)
        scalars = reduce_terms(terms, row.weights_T, row.loss_mask_T)
        scalars["total"].value.backward()
        parts.append(scalars)
        metrics.append(policy_metrics(inputs, terms, row.loss_mask_T))
        per_token.append(_token_values(loss, inputs, terms, row) if num_source else {})
    sum_gradients(policy.model, policy.shards, mesh)
    whole_loss = {name: functools.reduce(Scalar.__add__, [p[name] for p in parts]).complete(mesh)
                  for name in parts[0]}
    norms = {name: float(norm) for name, norm in gradient_norms(policy.model, policy.shards, mesh).items()}
    return StepResult(
        loss=whole_loss,
        metrics=finish_metrics(metrics, mesh["dp_cp"]),
        norms=norms,
        gradients=full_gradients(policy.model, policy.shards, mesh) if keep_gradients else {},
        tokens=_in_source_order(per_token, mesh, num_source) if num_source else {},
        totals=totals,
    )


def clip_gradients(policy: Policy, norms: Mapping[str, float], max_norm: float | None) -> float:
    """Scale gradients down to a global norm that is the same on every layout; returns the norm before."""
    norm = sum(value**2 for value in norms.values()) ** 0.5
    if max_norm is not None and norm > max_norm:
        for parameter in policy.model.parameters():
            parameter.grad.mul_(max_norm / norm)
    return norm


def _at_targets(values_S: Tensor | None, row: TrainingRow) -> Tensor | None:
    if values_S is None:
        return None
    return values_S.to(row.source_T.device)[row.source_T.clamp_min(0)] & row.loss_mask_T


def _token_values(loss: Loss, inputs: LossInputs, terms: Mapping[str, Term], row: TrainingRow) -> dict[str, Tensor]:
    """What is recorded of each token: "clipped" is what acted, "would_clip" what this run decides by itself."""
    with torch.no_grad():
        own = terms if inputs.frozen_clip_T is None else loss(replace(inputs, frozen_clip_T=None))
    none_T = torch.zeros_like(row.loss_mask_T)
    acted, decided = (next((t.clipped_T for t in made.values() if t.clipped_T is not None), none_T)
                      for made in (terms, own))
    return {
        "source": row.source_T,
        "targets": row.targets_T,
        "trained": row.loss_mask_T,
        "policy_logprobs": inputs.policy_logprobs_T.detach(),
        "old_logprobs": inputs.old_logprobs_T,
        "entropy_nats": inputs.entropy_T.detach(),
        "clipped": acted & row.loss_mask_T,
        "would_clip": decided & row.loss_mask_T,
    }


def _in_source_order(per_token: list[dict[str, Tensor]], mesh: Mesh, num_source: int) -> dict[str, Tensor]:
    """Gather per-token values of all dp x cp ranks and put each where its target stands in the source batch."""
    mine = {name: torch.cat([tokens[name] for tokens in per_token]) for name in per_token[0]}
    whole = {name: torch.cat(all_gather(values_T, mesh["dp_cp"])) for name, values_T in mine.items()}
    source = whole.pop("source")
    known = source != PADDING
    ordered = {}
    for name, values_T in whole.items():
        values_S = values_T.new_zeros(num_source)
        values_S[source[known]] = values_T[known]
        ordered[name] = values_S.cpu()
    return ordered
