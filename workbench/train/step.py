"""READ THIS FIRST: the whole workbench on one page.

One optimizer step of a policy loss, in any layout:

    pack -> shift targets -> weigh (on the whole step) -> split over cp -> hidden states -> token log-probabilities
    -> per-token loss -> weighted sum -> backward -> sum gradients over dp x cp -> metrics -> optimizer

Everything that looks across tokens happens before the split; everything after it is a plain sum over the tokens
of a rank. The one exception is what a loss must know of a whole document *and* of the current policy (a sequence
ratio): it asks `LocalRow.sums`, whose documents may straddle cp ranks. The functions of this module are also the
seams at which `workbench.faults` plants known bugs.

Letters: T packed tokens | S tokens of the source batch | D model dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.build import make_loss as make_loss
from workbench.losses.build import seen
from workbench.losses.document_sums import segment_ids
from workbench.losses.kl import kl_in_reward
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.metrics.definitions import Level
from workbench.metrics.evidence import GradientTokens, count_evidence, split_evidence
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
from workbench.sharding.attention import AttentionShard
from workbench.sharding.collectives import all_gather
from workbench.sharding.gradients import full_gradients, gradient_norms, scale_gradients, sum_gradients
from workbench.sharding.mesh import Mesh
from workbench.sharding.orders import Multiples, document_lengths, padding_rule
from workbench.sharding.plan import ShardPlan
from workbench.specs.run import LayoutSpec, LossSpec, ReproducibleSpec, RunSpec
from workbench.train.exact import (
    WholeRow,
    in_row_order,
    power_of_two,
    row_numbers,
    unsplit,
    up_to_last_document,
    within_range,
)
from workbench.train.fused import Evaluate, fused_logprobs, fused_row

ORDINARY = ReproducibleSpec()


@dataclass(frozen=True)
class LocalRow:
    """One micro-batch as one rank holds it.

    Attributes:
        row: this rank's tokens, in the order of the plan.
        weights: what each token's value is multiplied with, by the name that a term uses.
        attention: who sees whom, and how ranks come to each other's keys and values.
        sums: sums over whole documents, of which this rank may hold a part.
        documents: the names of the row's documents in the whole step, for metrics of documents.
        whole: the row before it was split, on which the loss is evaluated in the reproducible mode.
    """

    row: TrainingRow
    weights: Mapping[str, TokenWeights]
    attention: AttentionShard
    sums: ShardedSums
    documents: DocumentSlots
    whole: WholeRow | None = None

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
        range: of the reproducible mode: bits after the point of the sums of gradients, how many of them the largest
            partial gradient of a parameter uses at least, the power of two that the loss was multiplied with, retries.
    """

    loss: Mapping[str, Scalar]
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor]
    totals: StepTotals
    fallbacks: tuple[str, ...] = ()
    range: Mapping[str, float] = field(default_factory=dict)
    evidence: Mapping[str, float] = field(default_factory=dict)


def prepare_rows(
    batch: RolloutBatch, spec: RunSpec, mesh: Mesh, dealt: Sequence[Sequence[int]] | None = None
) -> tuple[list[LocalRow], StepTotals]:
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
    padded = [shift_targets(row).to(torch.device("cpu"), dtype) for row in pack_step(batch, spec, dealt)]
    whole = [up_to_last_document(row) for row in padded] if spec.reproducible.on else padded
    if spec.loss.needs_pairs:
        for row in whole:
            signs_of_pairs(row)  # refused here, on every rank, and not later by the one rank that holds the row
    weights, totals = step_weights(whole, spec.loss, cut=Cut(layout.dp, layout.cp))
    documents, numbers, each = name_documents(whole), row_numbers(whole), len(whole) // layout.dp
    rows = []
    for at in range(mesh["dp"].rank * each, (mesh["dp"].rank + 1) * each):
        row, plan = padded[at].to(mesh.device, dtype), plan_row(padded[at].document_ids_T, layout)
        held = {name: pair.map(lambda values_T: values_T.to(dtype)) for name, pair in weights[at].items()}
        if spec.reproducible.on:
            kept = WholeRow(numbers[at], whole[at], held, documents[at], plan, mesh["cp"])
            local = split_row(row, {}, documents[at]._replace(segment_lengths_T=None), plan, mesh, layout)
            rows.append(replace(local, whole=kept))
        else:
            held = {name: pair.map(lambda values_T: values_T.to(mesh.device)) for name, pair in held.items()}
            rows.append(split_row(row, held, documents[at], plan, mesh, layout))
    return rows, replace(totals, scale=power_of_two(whole, weights)) if spec.reproducible.on else totals


def make_advantages(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
    """The documents of a step with the advantages that the spec asks for.

    Every document of the step is here, so baselines see their groups, as far as the step holds them.

    Raises:
        SpecError: an estimator that lacks something in this batch, or a KL penalty in the reward that does.
    """
    asked, kl = spec.data.advantages, spec.loss.kl
    if asked.name == "recorded":
        return batch
    in_reward = bool(kl.coefficient) and kl.placement == "reward"
    if in_reward and batch.ref_logprobs_T is None:
        raise SpecError(
            "loss.kl.placement = 'reward'",
            found="no ref_logprobs",
            rule="the penalty is of the old policy against the reference",
            fix="record them with the rollouts, or leave the penalty out",
        )
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
        raise SpecError(
            "data.keep_groups",
            found="a batch without group_ids",
            rule="documents of a group share an id",
            fix="record group ids with the rollouts, or leave keep_groups out",
        )
    needed = multiples(layout, spec.reproducible)
    if data.multiple_of is not None and data.multiple_of % needed.row:
        smaller = ", or a smaller layout.block_tokens" if layout.order == "balanced" else ""
        raise SpecError(
            f"data.multiple_of = {data.multiple_of}",
            found=f"layout {layout}",
            rule=f"rows of this layout are multiples of {needed.row} tokens in every step, not by luck",
            fix=f"leave data.multiple_of out, or take a multiple of {needed.row}{smaller}",
        )
    how = {
        "multiple_of": data.multiple_of or needed.row,
        "document_multiple_of": needed.document,
        "together_N": batch.group_ids_N if data.keep_groups or spec.loss.needs_pairs else None,
    }
    if spec.reproducible.on and data.micro_batch_tokens is not None and data.micro_batch_tokens % how["multiple_of"]:
        raise SpecError(
            f"data.micro_batch_tokens = {data.micro_batch_tokens} in the reproducible mode",
            found=f"layout {layout}",
            rule=f"rows of this layout are multiples of {how['multiple_of']} "
            "tokens; what another multiple leaves of a row's room differs by layout, and its documents do",
            fix=f"take a multiple of {how['multiple_of']}, the same in every run that is to agree",
        )
    if dealt is not None:
        return deal(batch, dealt, multiple_of=how["multiple_of"], document_multiple_of=needed.document)
    if data.micro_batch_tokens is None:
        return pack(batch, rows=layout.dp * data.micro_batches, **how)
    return fill(batch, tokens=data.micro_batch_tokens, ranks=layout.dp, **how)


def multiples(layout: LayoutSpec, reproducible: ReproducibleSpec = ORDINARY) -> Multiples:
    """What the rows of a layout and the documents in them are padded to; in the reproducible mode to whole blocks."""
    order = layout.order if layout.cp > 1 else "contiguous"  # all orders are one
    found = padding_rule(
        order, layout.cp, block_tokens=layout.block_tokens, tp=layout.tp if layout.sequence_parallel else 1
    )
    if reproducible.block_tokens is None or order == "balanced":  # which moves blocks already
        return found
    return replace(found, row=found.row * reproducible.block_tokens)


def plan_row(document_ids_T: Tensor, layout: LayoutSpec) -> ShardPlan:
    """Which cp rank holds which token of a packed row, [T] of whose documents are given."""
    return ShardPlan.make(
        layout.order if layout.cp > 1 else "contiguous",
        num_tokens=len(document_ids_T),
        cp=layout.cp,
        document_lengths=document_lengths(document_ids_T, multiples(layout).document),
        block_tokens=layout.block_tokens,
    )


def name_documents(whole: Sequence[TrainingRow]) -> list[DocumentSlots]:
    """For each row, which documents of the whole step its own are, and how long each run of trained tokens is.

    Rows are counted in an order that no layout changes; see `row_numbers`.
    """
    counts = [int(row.document_ids_T.max()) + 1 for row in whole]
    numbers, found = row_numbers(whole), []
    for number, row in zip(numbers, whole, strict=True):
        runs_T = segment_ids(row.document_ids_T, row.loss_mask_T) + 1  # 0: no run
        lengths_T = torch.bincount(runs_T)[runs_T] * row.loss_mask_T
        before = sum(count for count, other in zip(counts, numbers, strict=True) if other < number)
        found.append(DocumentSlots(before, sum(counts), lengths_T))
    return found


def split_row(
    row: TrainingRow,
    weights: Mapping[str, TokenWeights],
    documents: DocumentSlots,
    plan: ShardPlan,
    mesh: Mesh,
    layout: LayoutSpec,
) -> LocalRow:
    """This rank's share of a row: every token-aligned tensor moved by one plan."""
    axis = mesh["cp"]
    inner, outer = (mesh["cp_inner"], mesh["cp_outer"]) if layout.attention == "hybrid" else (None, None)
    attention = AttentionShard.make(
        plan, row.document_ids_T, axis, algorithm=layout.attention, kernel=layout.kernel, inner=inner, outer=outer
    )

    def mine(values_T: Tensor) -> Tensor:
        return plan.split(values_T, axis.rank)

    if documents.segment_lengths_T is not None:
        documents = documents._replace(segment_lengths_T=mine(documents.segment_lengths_T.to(mesh.device)))
    return LocalRow(
        row.map(mine),
        {name: pair.map(mine) for name, pair in weights.items()},
        attention,
        ShardedSums(row, plan.positions(axis.rank), axis),
        documents,
    )


@within_range
def run_step(
    policy: Policy,
    loss: Loss,
    rows: Sequence[LocalRow],
    totals: StepTotals,
    *,
    num_source: int = 0,
    frozen_clip_S: Tensor | None = None,
    keep_gradients: bool = False,
    level: Level = "basic",
    loss_spec: LossSpec | None = None,
    fused: bool = False,
) -> StepResult:
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
        fused: loss and gradient in one pass over the head, of a policy that was loaded for it; see
            `workbench.train.fused`.
    """
    mesh = policy.mesh
    parts, metrics, per_token, fallbacks = [], [], [], []
    watched: list[GradientTokens] = []
    wanted, evaluate = (loss_spec or LossSpec()).head_outputs, _evaluation(loss, totals, watched)

    policy.give_back()
    policy.model.zero_grad(set_to_none=True)
    for local in rows:
        row = local.row
        watched.clear()
        hidden_TD = local.hidden_states(policy)
        if fused:
            frozen_T = _at_targets(frozen_clip_S, row)
            found, words = fused_row(policy, hidden_TD, local, frozen_T, evaluate, wanted, loss_spec)
            fallbacks += [words] if words else []
        else:
            said = _head_output(policy, hidden_TD, row, wanted)
            local, said = unsplit(local, said)  # in the reproducible mode every rank evaluates all of its row
            found = evaluate(local, said, _at_targets(frozen_clip_S, local.row))
        inputs, terms, scalars = found
        (totals.scale * scalars["total"].value).backward()
        parts.append(scalars)
        measured = inputs if loss_spec is None else seen(inputs, loss_spec)
        metrics.append(
            policy_metrics(measured, terms, local.row.loss_mask_T, level, loss_spec, local.documents)
            | count_evidence(inputs, terms, local.row, local.documents, watched[-1] if watched else None)
        )
        per_token.append(_token_values(loss, inputs, terms, local.row) if num_source else {})
    if policy.exact is None:
        sum_gradients(policy.model, policy.shards, mesh)
        norms = gradient_norms(policy.model, policy.shards, mesh)
        whole_loss = {
            name: functools.reduce(Scalar.__add__, [p[name] for p in parts]).complete(mesh) for name in parts[0]
        }
        numbers = finish_metrics(metrics, mesh["dp_cp"])
    else:
        policy.exact.reduce()
        norms = policy.exact.norms()
        whole_loss, numbers = in_row_order(parts, metrics, rows, mesh)
    numbers, evidence = split_evidence(numbers)
    return StepResult(
        loss=whole_loss,
        metrics=numbers | gradient_group_norms(norms, level),
        norms=norms,
        gradients=full_gradients(policy.model, policy.shards, mesh) if keep_gradients else {},
        tokens=in_source_order(per_token, mesh, num_source) if num_source else {},
        totals=totals,
        fallbacks=tuple(dict.fromkeys(fallbacks)),
        evidence=evidence,
    )


@torch.no_grad()
def row_logprobs(
    policy: Policy,
    loss: Loss,
    rows: Sequence[LocalRow],
    totals: StepTotals,
    *,
    num_source: int,
    loss_spec: LossSpec | None = None,
    fused: bool = False,
) -> Tensor:
    """Log-probabilities of the trained tokens of a step, bit for bit those of `run_step` on the same rows; 0 elsewhere.

    The same hidden states, implementation of the head, temperatures and chunks: a policy that has not moved since has
    ratios of exactly 1. Collective; the same on every rank.

    Args:
        policy: the model as this rank holds it.
        loss: of the step; how a fused head is cut depends on what it sums.
        rows: this rank's micro-batches, from `prepare_rows`.
        totals: of the whole step, from `prepare_rows`.
        num_source: S.
        loss_spec: as `run_step` takes it.
        fused: as `run_step` takes it.

    Shapes:   [S], in the order of the source batch.
    Units:    nats, at the temperature of each token, or of the policy.
    Backward: none.
    """
    per_token, wanted, evaluate = [], (loss_spec or LossSpec()).head_outputs, _evaluation(loss, totals)
    for local in rows:
        hidden_TD = local.hidden_states(policy)
        if fused:
            logprobs_T = fused_logprobs(policy, hidden_TD, local, evaluate, wanted, loss_spec)
        else:
            local, said = unsplit(local, _head_output(policy, hidden_TD, local.row, wanted))
            logprobs_T = said.logprobs_T
        row = local.row
        per_token.append({"source": row.source_T, "logprobs": torch.where(row.loss_mask_T, logprobs_T, 0.0)})
    policy.give_back()
    return in_source_order(per_token, policy.mesh, num_source)["logprobs"]


def _evaluation(loss: Loss, totals: StepTotals, watched: list[GradientTokens] | None = None) -> Evaluate:
    """The loss on what a rank holds of a row; evaluations that may be back-propagated are watched, the last one last.

    The last evaluation of a fused row is of all of its tokens.
    """

    def evaluate(local: LocalRow, said: TokenLogprobs, frozen_clip_T: Tensor | None) -> Evaluated:
        inputs = loss_inputs(local.row, said, totals, local.sums, frozen_clip_T)
        if watched is not None and torch.is_grad_enabled():
            watched.append(GradientTokens(local.row, inputs))
        return evaluate_loss(loss, inputs, local.weights, local.row.loss_mask_T)

    return evaluate


def _head_output(policy: Policy, hidden_TD: Tensor, row: TrainingRow, wanted: Sequence[str]) -> TokenLogprobs:
    """What the head says about every token of a row, where it is not fused."""
    return policy.token_logprobs(hidden_TD, row.targets_T, row.extensions.get("temperature_T"), wanted=wanted)


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
    acted, decided = (
        next((t.clipped_T for t in made.values() if t.clipped_T is not None), none_T) for made in (terms, own)
    )
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


def in_source_order(per_token: Sequence[Mapping[str, Tensor]], mesh: Mesh, num_source: int) -> dict[str, Tensor]:
    """Gather per-token values of all dp x cp ranks and put each where its target stands in the source batch."""
    mine = {name: torch.cat([tokens[name] for tokens in per_token]).to(mesh.device) for name in per_token[0]}
    whole = {name: torch.cat(all_gather(values_T, mesh["dp_cp"])) for name, values_T in mine.items()}
    source = whole.pop("source")
    known = source != PADDING
    ordered = {}
    for name, values_T in whole.items():
        values_S = values_T.new_zeros(num_source)
        values_S[source[known]] = values_T[known]
        ordered[name] = values_S.cpu()
    return ordered
