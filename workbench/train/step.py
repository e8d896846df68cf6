"""READ THIS FIRST: the whole workbench on one page.

One optimizer step of a policy loss, in any layout:

    pack -> shift targets -> weights (of the whole step) -> split over cp -> hidden states -> token log-probabilities
    -> per-token loss -> weighted sum -> backward -> sum gradients over dp x cp -> metrics -> optimizer

Everything that depends on several tokens happens before the split; everything after it is a plain sum over the
tokens of a rank. The one exception is a quantity of a whole document *and* the current policy (a sequence ratio): a
loss gets it from `LocalRow.sums`, whose documents may straddle cp ranks. The functions of this module are also the
seams at which `workbench.faults` plants known bugs.

Letters: T packed tokens | t tokens of this rank | S tokens of the source batch | D model dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.build import make_loss as make_loss
from workbench.losses.build import prepare_inputs
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
from workbench.reduction.scaling import StepLayout
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
    """This rank's shard of one micro-batch.

    Attributes:
        row: this rank's tokens, in the order of the shard plan.
        weights: per-token weights, by the name that a term uses.
        attention: the attention mask, and how keys and values are exchanged over cp.
        sums: sums over whole documents, of which this rank may hold a part.
        documents: the numbers of the row's documents in the whole step, for per-document metrics.
        whole: the row before the split, on which the loss is evaluated in the reproducible mode.
    """

    row: TrainingRow
    weights: Mapping[str, TokenWeights]
    attention: AttentionShard
    sums: ShardedSums
    documents: DocumentSlots
    whole: WholeRow | None = None

    def hidden_states(self, policy: Policy) -> Tensor:
        """[t, D] hidden states of this rank's tokens."""
        return policy.hidden_states(self.row.tokens_T, self.row.positions_T, self.attention)


@dataclass(frozen=True)
class StepResult:
    """The results of one step; the same on every rank.

    Attributes:
        loss: complete scalars, one per term and "total".
        metrics: final values by key.
        norms: L2 norm of every parameter's full gradient.
        gradients: every parameter's full gradient; empty unless requested.
        tokens: per-token values in the order of the source batch, [S]; empty unless requested.
        totals: tokens and documents of the whole step.
        fallbacks: why this rank's fused rows took more than three GEMMs with the head.
        range: in the reproducible mode: fractional bits of the gradient sums, the fewest of them that the largest
            partial gradient of any parameter uses, the power of two by which the loss was multiplied, retries.
        evidence: counts of trained tokens and documents to which the loss sends a gradient.
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
    batch: RolloutBatch, spec: RunSpec, mesh: Mesh, document_rows: Sequence[Sequence[int]] | None = None
) -> tuple[list[LocalRow], StepTotals]:
    """Split the documents of one optimizer step into this rank's micro-batches.

    Every rank sees the whole step here, so the weights need no collective and cannot be local: all micro-batches of
    all ranks, however many the step has, are divided by the same counts.

    Args:
        batch: the documents of the whole step.
        spec: of the run.
        mesh: the axes.
        document_rows: the documents of each row, see `pack_step`.

    Raises:
        SpecError: a loss on preference pairs with a group that is not a pair; advantages that the batch does not allow.
    """
    batch = compute_advantages(batch, spec)
    layout, dtype = spec.layout, DTYPES["float64" if spec.precision == "float64" else "float32"]
    padded = [shift_targets(row).to(torch.device("cpu"), dtype) for row in pack_step(batch, spec, document_rows)]
    whole = [up_to_last_document(row) for row in padded] if spec.reproducible.on else padded
    if spec.loss.needs_pairs:
        for row in whole:
            signs_of_pairs(row)  # raises here, on every rank: an error on one rank alone would hang the others
    # On all rows, before the split: no denominator is local (DECISIONS.md, row 2).
    weights, totals = step_weights(whole, spec.loss, step_layout=StepLayout(layout.dp, layout.cp))
    documents, numbers, per_rank = number_documents(whole), row_numbers(whole), len(whole) // layout.dp
    rows = []
    for at in range(mesh["dp"].rank * per_rank, (mesh["dp"].rank + 1) * per_rank):
        row, plan = padded[at].to(mesh.device, dtype), plan_row(padded[at].document_ids_T, layout)
        by_name = {name: pair.map(lambda values_T: values_T.to(dtype)) for name, pair in weights[at].items()}
        if spec.reproducible.on:
            whole_row = WholeRow(numbers[at], whole[at], by_name, documents[at], plan, mesh["cp"])
            local = split_row(row, {}, documents[at]._replace(segment_lengths_T=None), plan, mesh, layout)
            rows.append(replace(local, whole=whole_row))
        else:
            by_name = {name: pair.map(lambda values_T: values_T.to(mesh.device)) for name, pair in by_name.items()}
            rows.append(split_row(row, by_name, documents[at], plan, mesh, layout))
    return rows, replace(totals, scale=power_of_two(whole, weights)) if spec.reproducible.on else totals


def compute_advantages(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
    """Return the documents of a step with the advantages that the spec requests.

    Every document of the step is here, so baselines see their groups, as far as the step holds them.

    Raises:
        SpecError: the batch lacks a field that the estimator, or a KL penalty in the reward, needs.
    """
    estimator, kl = spec.data.advantages, spec.loss.kl
    if estimator.name == "recorded":
        return batch
    in_reward = bool(kl.coefficient) and kl.placement == "reward"
    if in_reward and batch.ref_logprobs_T is None:
        raise SpecError(
            "loss.kl.placement = 'reward'",
            found="no ref_logprobs",
            rule="the penalty compares the old policy with the reference policy",
            fix="record ref_logprobs with the rollouts, or leave the penalty out",
        )
    penalties_T, values = None, batch.extensions.get("values")
    if in_reward:
        penalties_T = kl_in_reward(batch.old_logprobs_T, batch.ref_logprobs_T, batch.loss_mask_T, kl)
    inputs = AdvantageInputs.of(batch, penalties_T=penalties_T, values_T=None if values is None else values.values)
    return replace(batch, advantages_T=estimate_advantages(estimator.name, inputs, **estimator.settings).advantages_T)


def pack_step(
    batch: RolloutBatch, spec: RunSpec, document_rows: Sequence[Sequence[int]] | None = None
) -> list[RolloutBatch]:
    """Pack the rows of one optimizer step: those of the first dp rank, then those of the second, ...

    Args:
        batch: the documents of the whole step.
        spec: of the run.
        document_rows: numbers of the documents of each row, a multiple of dp rows; None: assigned by `pack` or `fill`.

    Raises:
        SpecError: ``data.keep_groups`` without group ids; a multiple that the layout cannot split.
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
            rule=f"rows of this layout are multiples of {needed.row} tokens in every step",
            fix=f"leave data.multiple_of out, or take a multiple of {needed.row}{smaller}",
        )
    rules = {
        "multiple_of": data.multiple_of or needed.row,
        "document_multiple_of": needed.document,
        "together_N": batch.group_ids_N if data.keep_groups or spec.loss.needs_pairs else None,
    }
    if spec.reproducible.on and data.micro_batch_tokens is not None and data.micro_batch_tokens % rules["multiple_of"]:
        raise SpecError(
            f"data.micro_batch_tokens = {data.micro_batch_tokens} in the reproducible mode",
            found=f"layout {layout}",
            rule=f"rows of this layout are multiples of {rules['multiple_of']} "
            "tokens; with another multiple the capacity of a row, and so its documents, depend on the layout",
            fix=f"take a multiple of {rules['multiple_of']}, the same in every run that is to agree",
        )
    if document_rows is not None:
        return deal(batch, document_rows, multiple_of=rules["multiple_of"], document_multiple_of=needed.document)
    if data.micro_batch_tokens is None:
        return pack(batch, rows=layout.dp * data.micro_batches, **rules)
    return fill(batch, tokens=data.micro_batch_tokens, ranks=layout.dp, **rules)


def multiples(layout: LayoutSpec, reproducible: ReproducibleSpec = ORDINARY) -> Multiples:
    """Return the multiples to which rows and documents are padded; rows in the reproducible mode to whole blocks."""
    order = layout.order if layout.cp > 1 else "contiguous"  # on one rank all orders coincide
    rule = padding_rule(
        order, layout.cp, block_tokens=layout.block_tokens, tp=layout.tp if layout.sequence_parallel else 1
    )
    if reproducible.block_tokens is None or order == "balanced":  # "balanced" pads to whole blocks already
        return rule
    return replace(rule, row=rule.row * reproducible.block_tokens)


def plan_row(document_ids_T: Tensor, layout: LayoutSpec) -> ShardPlan:
    """Return the shard plan of a packed row over cp, given its document ids [T]."""
    return ShardPlan.make(
        layout.order if layout.cp > 1 else "contiguous",
        num_tokens=len(document_ids_T),
        cp=layout.cp,
        document_lengths=document_lengths(document_ids_T, multiples(layout).document),
        block_tokens=layout.block_tokens,
    )


def number_documents(whole: Sequence[TrainingRow]) -> list[DocumentSlots]:
    """Return, for each row, the numbers of its documents in the step and the length of each run of trained tokens.

    Rows are counted in an order that is independent of the layout; see `row_numbers`.
    """
    counts = [int(row.document_ids_T.max()) + 1 for row in whole]
    numbers, slots = row_numbers(whole), []
    for number, row in zip(numbers, whole, strict=True):
        runs_T = segment_ids(row.document_ids_T, row.loss_mask_T) + 1  # 0: no run
        lengths_T = torch.bincount(runs_T)[runs_T] * row.loss_mask_T
        before = sum(count for count, other in zip(counts, numbers, strict=True) if other < number)
        slots.append(DocumentSlots(before, sum(counts), lengths_T))
    return slots


def split_row(
    row: TrainingRow,
    weights: Mapping[str, TokenWeights],
    documents: DocumentSlots,
    plan: ShardPlan,
    mesh: Mesh,
    layout: LayoutSpec,
) -> LocalRow:
    """Return this rank's shard of a row: every token-aligned tensor is split by the same plan."""
    axis = mesh["cp"]
    inner, outer = (mesh["cp_inner"], mesh["cp_outer"]) if layout.attention == "hybrid" else (None, None)
    attention = AttentionShard.make(
        plan, row.document_ids_T, axis, algorithm=layout.attention, kernel=layout.kernel, inner=inner, outer=outer
    )

    def shard(values_T: Tensor) -> Tensor:
        return plan.split(values_T, axis.rank)

    if documents.segment_lengths_T is not None:
        documents = documents._replace(segment_lengths_T=shard(documents.segment_lengths_T.to(mesh.device)))
    return LocalRow(
        row.map(shard),
        {name: pair.map(shard) for name, pair in weights.items()},
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
    """Compute loss, gradients and metrics of one optimizer step; gradients stay in ``parameter.grad``.

    Args:
        policy: this rank's shard of the model.
        loss: pure per-token loss.
        rows: this rank's micro-batches, from `prepare_rows`.
        totals: of the whole step, from `prepare_rows`.
        num_source: S; if not 0, per-token values are gathered in the order of the source batch.
        frozen_clip_S: [S] bool, clip decisions of another run.
        keep_gradients: gather every parameter's full gradient.
        level: which metrics are computed: none, basic or full.
        loss_spec: the settings of the loss, for metrics of its bounds; None: these metrics are left out.
        fused: compute loss and gradient in one pass over the head, with a policy that was loaded for it; see
            `workbench.train.fused`.
    """
    mesh = policy.mesh
    parts, metrics, per_token, fallbacks = [], [], [], []
    tracked: list[GradientTokens] = []
    outputs, evaluate = (loss_spec or LossSpec()).head_outputs, _loss_evaluator(loss, totals, tracked)

    policy.reshard()
    policy.model.zero_grad(set_to_none=True)
    for local in rows:
        row = local.row
        tracked.clear()
        hidden_TD = local.hidden_states(policy)
        if fused:
            frozen_T = _at_targets(frozen_clip_S, row)
            evaluated, fallback = fused_row(policy, hidden_TD, local, frozen_T, evaluate, outputs, loss_spec)
            fallbacks += [fallback] if fallback else []
        else:
            head_output = _head_output(policy, hidden_TD, row, outputs)
            local, head_output = unsplit(local, head_output)  # in the reproducible mode every rank evaluates whole rows
            evaluated = evaluate(local, head_output, _at_targets(frozen_clip_S, local.row))
        inputs, terms, scalars = evaluated
        (totals.scale * scalars["total"].value).backward()
        parts.append(scalars)
        measured = inputs if loss_spec is None else prepare_inputs(inputs, loss_spec)
        metrics.append(
            policy_metrics(measured, terms, local.row.loss_mask_T, level, loss_spec, local.documents)
            | count_evidence(inputs, terms, local.row, local.documents, tracked[-1] if tracked else None)
        )
        per_token.append(_token_values(loss, inputs, terms, local.row) if num_source else {})
    if policy.exact is None:
        # Summed, never averaged: the weights are divided by counts of the whole step already (DECISIONS.md, row 3).
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
    """Log-probabilities of the trained tokens of a step, bitwise equal to `run_step` on the same rows; 0 elsewhere.

    Hidden states, head implementation, temperatures and chunks are the same, so an unchanged policy has ratios of
    exactly 1. Collective; the same on every rank.

    Args:
        policy: this rank's shard of the model.
        loss: of the step; the chunks of a fused head depend on the sums that it takes.
        rows: this rank's micro-batches, from `prepare_rows`.
        totals: of the whole step, from `prepare_rows`.
        num_source: S.
        loss_spec: see `run_step`.
        fused: see `run_step`.

    Shapes:   [S], in the order of the source batch.
    Units:    nats, at the temperature of each token, or of the policy.
    Backward: none.
    """
    per_token, outputs, evaluate = [], (loss_spec or LossSpec()).head_outputs, _loss_evaluator(loss, totals)
    for local in rows:
        hidden_TD = local.hidden_states(policy)
        if fused:
            logprobs_T = fused_logprobs(policy, hidden_TD, local, evaluate, outputs, loss_spec)
        else:
            local, head_output = unsplit(local, _head_output(policy, hidden_TD, local.row, outputs))
            logprobs_T = head_output.logprobs_T
        row = local.row
        per_token.append({"source": row.source_T, "logprobs": torch.where(row.loss_mask_T, logprobs_T, 0.0)})
    policy.reshard()
    return in_source_order(per_token, policy.mesh, num_source)["logprobs"]


def _loss_evaluator(loss: Loss, totals: StepTotals, tracked: list[GradientTokens] | None = None) -> Evaluate:
    """Return the loss as a function of a rank's tokens; evaluations with a gradient are appended to ``tracked``.

    The last evaluation of a fused row covers all of its tokens.
    """

    def evaluate(local: LocalRow, head_output: TokenLogprobs, frozen_clip_T: Tensor | None) -> Evaluated:
        inputs = loss_inputs(local.row, head_output, totals, local.sums, frozen_clip_T)
        if tracked is not None and torch.is_grad_enabled():
            tracked.append(GradientTokens(local.row, inputs))
        return evaluate_loss(loss, inputs, local.weights, local.row.loss_mask_T)

    return evaluate


def _head_output(policy: Policy, hidden_TD: Tensor, row: TrainingRow, outputs: Sequence[str]) -> TokenLogprobs:
    """Head outputs of every token of a row, without fusion."""
    return policy.token_logprobs(hidden_TD, row.targets_T, row.extensions.get("temperature_T"), outputs=outputs)


def clip_gradients(policy: Policy, norms: Mapping[str, float], max_norm: float | None) -> float:
    """Clip gradients to a global norm, which is the same in every layout; return the norm before clipping."""
    norm = sum(value**2 for value in norms.values()) ** 0.5
    coefficient = clip_coefficient(norm, max_norm)
    if coefficient != 1.0:
        scale_gradients(policy.model, policy.shards, coefficient)
    return norm


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of this global norm to ``max_norm``; 1 leaves them unchanged."""
    return max_norm / norm if max_norm is not None and norm > max_norm else 1.0


def _at_targets(values_S: Tensor | None, row: TrainingRow) -> Tensor | None:
    if values_S is None:
        return None
    return values_S.to(row.source_T.device)[row.source_T.clamp_min(0)] & row.loss_mask_T


def _token_values(loss: Loss, inputs: LossInputs, terms: Mapping[str, Term], row: TrainingRow) -> dict[str, Tensor]:
    """Per-token values for the record: "clipped" is the decision applied, "would_clip" this run's own decision."""
    with torch.no_grad():
        own_terms = terms if inputs.frozen_clip_T is None else loss(replace(inputs, frozen_clip_T=None))
    none_T = torch.zeros_like(row.loss_mask_T)
    applied_T, own_T = (
        next((t.clipped_T for t in named.values() if t.clipped_T is not None), none_T) for named in (terms, own_terms)
    )
    return {
        "source": row.source_T,
        "targets": row.targets_T,
        "trained": row.loss_mask_T,
        "policy_logprobs": inputs.policy_logprobs_T.detach(),
        "old_logprobs": inputs.old_logprobs_T,
        "entropy_nats": inputs.entropy_T.detach(),
        "clipped": applied_T & row.loss_mask_T,
        "would_clip": own_T & row.loss_mask_T,
    }


def in_source_order(per_token: Sequence[Mapping[str, Tensor]], mesh: Mesh, num_source: int) -> dict[str, Tensor]:
    """Gather per-token values of all dp x cp ranks, each at the position of its target in the source batch."""
    local = {name: torch.cat([tokens[name] for tokens in per_token]).to(mesh.device) for name in per_token[0]}
    gathered = {name: torch.cat(all_gather(values_T, mesh["dp_cp"])) for name, values_T in local.items()}
    source = gathered.pop("source")
    is_token = source != PADDING  # source positions name tokens in every packing (DECISIONS.md, row 8)
    ordered = {}
    for name, values_T in gathered.items():
        values_S = values_T.new_zeros(num_source)
        values_S[source[is_token]] = values_T[is_token]
        ordered[name] = values_S.cpu()
    return ordered
