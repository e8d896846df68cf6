"""READ THIS FIRST: the whole workbench on one page.

One optimizer step of a policy loss, in any layout:

    pack -> shift targets -> weigh (on the whole step) -> split over cp -> hidden states -> token log-probabilities
    -> per-token loss -> weighted sum -> backward -> sum gradients over dp x cp -> metrics -> optimizer

Everything that looks across tokens happens before the split; everything after it is a plain sum over the tokens
of a rank. The one exception is what a loss must know of a whole document *and* of the current policy (a sequence
ratio): it asks `LocalRow.sums`, whose documents may straddle cp ranks. The functions of this module are also the
seams at which `workbench.runs.faults` plants known bugs.

Letters: T packed tokens | S tokens of the source batch | D model dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.build import make_loss as make_loss
from workbench.losses.build import seen
from workbench.losses.document_sums import segment_ids
from workbench.losses.kl import kl_in_reward
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.metrics.definitions import Level
from workbench.metrics.gradients import gradient_group_norms
from workbench.metrics.policy import policy_metrics
from workbench.metrics.quantities import DocumentSlots
from workbench.metrics.values import finish_metrics
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.model import DTYPES, Policy
from workbench.reduction.document_sums import ShardedSums, signs_of_pairs
from workbench.reduction.evaluate import Evaluated, evaluate_loss, loss_inputs
from workbench.reduction.partial import Scalar
from workbench.reduction.scaling import Cut
from workbench.reduction.weights import StepTotals, TokenWeights, step_weights
from workbench.rollouts.advantages.registry import AdvantageInputs, estimate_advantages
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.packing import deal, fill, pack
from workbench.rollouts.targets import TrainingRow, shift_targets
from workbench.runs.fused import fused_row
from workbench.runs.spec import LayoutSpec, LossSpec, RunSpec
from workbench.sharding.attention import AttentionShard
from workbench.sharding.collectives import all_gather
from workbench.sharding.gradients import full_gradients, gradient_norms, scale_gradients, sum_gradients
from workbench.sharding.mesh import Mesh
from workbench.sharding.orders import Multiples, document_lengths, padding_rule
from workbench.sharding.plan import ShardPlan


@dataclass(frozen=True)
class LocalRow:
    """One micro-batch as one rank holds it.

    Attributes:
        row: this rank's tokens, in the order of the plan.
        weights: what each token's value is multiplied with, by the name that a term uses.
        attention: who sees whom, and how ranks come to each other's keys and values.
        sums: sums over whole documents, of which this rank may hold a part.
        documents: the names of the row's documents in the whole step, for metrics of documents.
    """

    row: TrainingRow
    weights: Mapping[str, TokenWeights]
    attention: AttentionShard
    sums: ShardedSums
    documents: DocumentSlots

    def hidden_states(self, policy: Policy) -> Tensor:
        """[t, D] what the policy makes of this rank's tokens."""
        return policy.hidden_states(self.row.tokens_T, self.row.positions_T, self.attention)


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
        fallbacks: why this rank's fused rows took more than three products with the head.
    """

    loss: Mapping[str, Scalar]
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor]
    totals: StepTotals
    fallbacks: tuple[str, ...] = ()


def prepare_rows(batch: RolloutBatch, spec: RunSpec, mesh: Mesh,
                 dealt: Sequence[Sequence[int]] | None = None) -> tuple[list[LocalRow], StepTotals]:
    """Turn the documents of one optimizer step into this rank's micro-batches.

    Every rank sees the whole step here, so the weights need no collective and cannot be local: all micro-batches of
    all ranks, however many the step takes, are divided by the same counts.

    Args:
        batch: the documents of the whole step.
        spec: of the run.
        mesh: the axes.
        dealt: which documents lie in which row, as `pack_step` takes it.

    Raises:
        SpecError: a loss on preference pairs, and a group of a row that is not a pair; advantages that the rollouts do
            not allow.
    """
    batch = make_advantages(batch, spec)
    layout, dtype = spec.layout, DTYPES["float64" if spec.precision == "float64" else "float32"]
    whole = [shift_targets(row).to(torch.device("cpu"), dtype) for row in pack_step(batch, spec, dealt)]
    if spec.loss.needs_pairs:
        for row in whole:
            signs_of_pairs(row)  # refused here, on every rank, and not later by the one rank that holds the row
    weights, totals = step_weights(whole, spec.loss, cut=Cut(layout.dp, layout.cp))
    each = len(whole) // layout.dp
    mine = slice(mesh["dp"].rank * each, (mesh["dp"].rank + 1) * each)
    rows = []
    for row, named, documents in zip(whole[mine], weights[mine], name_documents(whole)[mine], strict=True):
        plan = plan_row(row.document_ids_T, layout)
        held = {name: pair.map(lambda values_T: values_T.to(mesh.device, dtype)) for name, pair in named.items()}
        rows.append(split_row(row.to(mesh.device, dtype), held, documents, plan, mesh, layout))
    return rows, totals


def make_advantages(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
    """The documents of a step with the advantages that the spec asks for.

    Every document of the step is here, so baselines see their groups, as far as the step holds them.

    Raises:
        SpecError: an estimator that lacks something in this batch; a KL penalty in a reward that nobody uses.
    """
    asked, kl = spec.data.advantages, spec.loss.kl
    in_reward = bool(kl.coefficient) and kl.placement == "reward"
    if asked.name == "recorded":
        if in_reward:
            raise SpecError("loss.kl.placement = 'reward'", found="advantages that came with the rollouts",
                            rule="a penalty in the reward acts before advantages are made",
                            fix="name an estimator in data.advantages, or place the penalty in the loss")
        return batch
    if in_reward and batch.ref_logprobs_T is None:
        raise SpecError("loss.kl.placement = 'reward'", found="no ref_logprobs",
                        rule="the penalty is of the old policy against the reference",
                        fix="record them with the rollouts, or leave the penalty out")
    penalties_T, values = None, batch.extensions.get("values")
    if in_reward:
        penalties_T = kl_in_reward(batch.old_logprobs_T, batch.ref_logprobs_T, batch.loss_mask_T, kl)
    made = AdvantageInputs.of(batch, penalties_T=penalties_T, values_T=None if values is None else values.values)
    return replace(batch, advantages_T=estimate_advantages(asked.name, made, **asked.settings).advantages_T)


def pack_step(batch: RolloutBatch, spec: RunSpec, dealt: Sequence[Sequence[int]] | None = None) -> list[RolloutBatch]:
    """The rows of one optimizer step: those of the first dp rank, then those of the second, ...

    Args:
        batch: the documents of the whole step.
        spec: of the run.
        dealt: numbers of the documents of each row, a multiple of dp rows; None: `pack` or `fill` deal them.

    Raises:
        SpecError: groups that are to be kept, and are not known; a multiple that the layout cannot cut.
    """
    layout, data = spec.layout, spec.data
    if data.keep_groups and batch.group_ids_N is None:
        raise SpecError("data.keep_groups", found="a batch without group_ids", rule="documents of a group share an id",
                        fix="record group ids with the rollouts, or leave keep_groups out")
    needed = multiples(layout)
    if data.multiple_of is not None and data.multiple_of % needed.row:
        smaller = ", or a smaller layout.block_tokens" if layout.order == "balanced" else ""
        raise SpecError(f"data.multiple_of = {data.multiple_of}", found=f"layout {layout}",
                        rule=f"rows of this layout are multiples of {needed.row} tokens in every step, not by luck",
                        fix=f"leave data.multiple_of out, or take a multiple of {needed.row}{smaller}")
    how = {"multiple_of": data.multiple_of or needed.row, "document_multiple_of": needed.document,
           "together_N": batch.group_ids_N if data.keep_groups or spec.loss.needs_pairs else None}
    if dealt is not None:
        return deal(batch, dealt, multiple_of=how["multiple_of"], document_multiple_of=needed.document)
    if data.micro_batch_tokens is None:
        return pack(batch, rows=layout.dp * data.micro_batches, **how)
    return fill(batch, tokens=data.micro_batch_tokens, ranks=layout.dp, **how)


def multiples(layout: LayoutSpec) -> Multiples:
    """What the rows of a layout and the documents in them are padded to."""
    order = layout.order if layout.cp > 1 else "contiguous"  # all orders are one
    return padding_rule(order, layout.cp, block_tokens=layout.block_tokens,
                        tp=layout.tp if layout.sequence_parallel else 1)


def plan_row(document_ids_T: Tensor, layout: LayoutSpec) -> ShardPlan:
    """Which cp rank holds which token of a packed row, [T] of whose documents are given."""
    return ShardPlan.make(layout.order if layout.cp > 1 else "contiguous", num_tokens=len(document_ids_T), cp=layout.cp,
                          document_lengths=document_lengths(document_ids_T, multiples(layout).document),
                          block_tokens=layout.block_tokens)


def name_documents(whole: Sequence[TrainingRow]) -> list[DocumentSlots]:
    """For each row, which documents of the whole step its own are, and how long each run of trained tokens is."""
    counts = [int(row.document_ids_T.max()) + 1 for row in whole]
    found = []
    for number, row in enumerate(whole):
        runs_T = segment_ids(row.document_ids_T, row.loss_mask_T) + 1  # 0: no run
        lengths_T = torch.bincount(runs_T)[runs_T] * row.loss_mask_T
        found.append(DocumentSlots(sum(counts[:number]), sum(counts), lengths_T))
    return found


def split_row(row: TrainingRow, weights: Mapping[str, TokenWeights], documents: DocumentSlots, plan: ShardPlan,
              mesh: Mesh, layout: LayoutSpec) -> LocalRow:
    """This rank's share of a row: every token-aligned tensor moved by one plan."""
    axis = mesh["cp"]
    inner, outer = (mesh["cp_inner"], mesh["cp_outer"]) if layout.attention == "hybrid" else (None, None)
    attention = AttentionShard.make(plan, row.document_ids_T, axis, algorithm=layout.attention, kernel=layout.kernel,
                                    inner=inner, outer=outer)

    def mine(values_T: Tensor) -> Tensor:
        return plan.split(values_T, axis.rank)

    return LocalRow(row.map(mine), {name: pair.map(mine) for name, pair in weights.items()},
                    attention, ShardedSums(row, plan.positions(axis.rank), axis),
                    documents._replace(segment_lengths_T=mine(documents.segment_lengths_T.to(mesh.device))))


def run_step(policy: Policy, loss: Loss, rows: Sequence[LocalRow], totals: StepTotals, *, num_source: int = 0,
             frozen_clip_S: Tensor | None = None, keep_gradients: bool = False, level: Level = "basic",
             loss_spec: LossSpec | None = None, fused: bool = False) -> StepResult:
    """Loss, gradients and metrics of one optimizer step; gradients stay in ``parameter.grad``.

    Args:
        policy: the model as this rank holds it.
        loss: pure per-token loss.
        rows: this rank's micro-batches, from `prepare_rows`.
        totals: of the whole step, from `prepare_rows`.
        num_source: S; if not 0, per-token values are gathered in the order of the source batch.
        frozen_clip_S: [S] bool, clip decisions taken elsewhere.
        keep_gradients: gather every parameter's whole gradient.
        level: how much is measured: none, basic or full.
        loss_spec: what the loss was made from, for metrics that look at its bounds; None: they are left out.
        fused: loss and gradient in one pass over the head; see `workbench.runs.fused`.
    """
    mesh = policy.mesh
    parts, metrics, per_token, fallbacks = [], [], [], []
    wanted = (loss_spec or LossSpec()).head_outputs

    def evaluate(local: LocalRow, said: TokenLogprobs, frozen_clip_T: Tensor | None) -> Evaluated:
        inputs = loss_inputs(local.row, said, totals, local.sums, frozen_clip_T)
        return evaluate_loss(loss, inputs, local.weights, local.row.loss_mask_T)

    policy.model.zero_grad(set_to_none=True)
    for local in rows:
        row = local.row
        hidden_TD = local.hidden_states(policy)
        frozen_T, temperature_T = _at_targets(frozen_clip_S, row), row.extensions.get("temperature_T")
        if fused:
            found, words = fused_row(policy, hidden_TD, local, frozen_T, evaluate, wanted, loss_spec)
            fallbacks += [words] if words else []
        else:
            said = policy.token_logprobs(hidden_TD, row.targets_T, temperature_T, wanted=wanted)
            found = evaluate(local, said, frozen_T)
        inputs, terms, scalars = found
        scalars["total"].value.backward()
        parts.append(scalars)
        measured = inputs if loss_spec is None else seen(inputs, loss_spec)
        metrics.append(policy_metrics(measured, terms, row.loss_mask_T, level, loss_spec, local.documents))
        per_token.append(_token_values(loss, inputs, terms, row) if num_source else {})
    sum_gradients(policy.model, policy.shards, mesh)
    whole_loss = {name: functools.reduce(Scalar.__add__, [p[name] for p in parts]).complete(mesh)
                  for name in parts[0]}
    norms = gradient_norms(policy.model, policy.shards, mesh)
    return StepResult(
        loss=whole_loss,
        metrics=finish_metrics(metrics, mesh["dp_cp"]) | gradient_group_norms(norms, level),
        norms=norms,
        gradients=full_gradients(policy.model, policy.shards, mesh) if keep_gradients else {},
        tokens=_in_source_order(per_token, mesh, num_source) if num_source else {},
        totals=totals,
        fallbacks=tuple(dict.fromkeys(fallbacks)),
    )


def clip_gradients(policy: Policy, norms: Mapping[str, float], max_norm: float | None) -> float:
    """Scale gradients down to a global norm that is the same on every layout; returns the norm before."""
    norm = sum(value**2 for value in norms.values()) ** 0.5
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0:
        scale_gradients(policy.model, policy.shards, coefficient)
    return norm


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients of this global norm are multiplied with before the optimizer sees them; 1 leaves them."""
    return max_norm / norm if max_norm is not None and norm > max_norm else 1.0


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
