"""Rows of a step: documents packed into rows, split into the shards of ranks, and back to the source batch's order.

Letters: T packed tokens | t tokens of this rank | S tokens of the source batch | D model dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.document_sums import DocumentSums, segment_ids
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.metrics.definitions import Level
from workbench.metrics.quantities import DocumentSlots
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.recomputed import outside_support
from workbench.policy.logprobs.truncated_support import TruncatedSupport
from workbench.policy.model import Policy
from workbench.policy.routers import Routes
from workbench.reduction.weights import TokenWeights
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.packing import deal, fill, pack
from workbench.rollouts.sampling import Sampling
from workbench.rollouts.support import SUPPORT
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.attention import AttentionShard
from workbench.sharding.collectives import gather_many, sum_sum
from workbench.sharding.divisibility import check_row_multiple
from workbench.sharding.divisibility import multiples as multiples
from workbench.sharding.mesh import Axis, Mesh
from workbench.sharding.orders import document_lengths
from workbench.sharding.pipeline import share_tensors
from workbench.sharding.plan import ShardPlan
from workbench.specs.groups import LayoutSpec
from workbench.specs.run import RunSpec


@dataclass(frozen=True)
class StepData:
    """The training data of one optimizer step.

    Attributes:
        documents: of the step.
        source: the batch from which they were taken; per-token records are in its order.
        numbers: statistics of the sampling, for the step's record.
        fresh: True for the first step on that batch.
        sync: hashes of trainer and sampler that differ, for a file; {} if they were not compared.
    """

    documents: RolloutBatch
    source: RolloutBatch
    numbers: Mapping[str, float] = field(default_factory=dict)
    fresh: bool = False
    sync: Mapping[str, Any] = field(default_factory=dict)


def in_order(batch: RolloutBatch, documents_per_step: int | None, first: int = 0) -> Iterator[RolloutBatch]:
    """Yield the documents of each optimizer step from step ``first``: in order, cyclically; None: all of them."""
    if documents_per_step is None:
        yield from itertools.repeat(batch)
        return
    for taken in itertools.count(first * documents_per_step, documents_per_step):
        yield batch.select([(taken + i) % batch.num_documents for i in range(documents_per_step)])


@dataclass(frozen=True)
class WholeRow:
    """The row on which every rank that shares it evaluates the loss: not split, without the padding at its end.

    On the CPU, where any loss and metric is deterministic: a GPU sums documents with atomics. Some kilobytes a row are
    copied each way while the GPU continues.

    Attributes:
        number: of the row in the step; see `row_numbers`.
        row: the tokens, in the order of the row.
        weights: as in `LocalRow`.
        documents: as in `LocalRow`.
        plan: how the row is split.
        axis: the ranks that share it.
    """

    number: int
    row: TrainingRow
    weights: Mapping[str, TokenWeights]
    documents: DocumentSlots
    plan: ShardPlan
    axis: Axis


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
        sampling: of the batch.
        trained: number of targets that are trained, counted on the host; None: not counted. Only speed depends on it.
    """

    row: TrainingRow
    weights: Mapping[str, TokenWeights]
    attention: AttentionShard
    sums: DocumentSums
    documents: DocumentSlots
    whole: WholeRow | None = None
    sampling: Sampling = field(default_factory=Sampling)
    trained: int | None = None

    def hidden_states(self, policy: Policy, routes: Routes | None = None) -> Tensor:
        """[t, D] hidden states of this rank's tokens, with the routes of this pass."""
        more: dict[str, Any] = {} if routes is None else {"routes": routes}
        return policy.hidden_states(self.row.tokens_T, self.row.positions_T, self.attention, **more)

    @property
    def support(self) -> TruncatedSupport | None:
        """Truncated support of each target in the sampler; None: log-probabilities are over the whole vocabulary."""
        ids_TK = self.row.extensions.get(SUPPORT)
        return None if ids_TK is None else TruncatedSupport.of_table(ids_TK)

    def stage_output(self, policy: Policy, stage: int, input_TD: Tensor | None, routes: Routes | None = None) -> Tensor:
        """[t, D] output of one of this rank's pipeline stages, on the output of the stage before (None: the first)."""
        row = self.row
        return policy.stage_output(stage, row.tokens_T, row.positions_T, self.attention, input_TD, routes)

    def token_logprobs(
        self, policy: Policy, hidden_TD: Tensor, outputs: Sequence[str], active_T: Tensor | None = None
    ) -> TokenLogprobs:
        """[t] head outputs of this rank's tokens; with ``active_T`` [t] bool, of those alone."""
        row = self.row
        temperature_T = row.extensions.get("temperature_T")
        more: dict[str, Any] = {} if (support := self.support) is None else {"support": support}
        return policy.token_logprobs(
            hidden_TD, row.targets_T, temperature_T, active_T=active_T, outputs=outputs, **more
        )

    def with_support_measures(self, inputs: LossInputs, policy: Policy, hidden_TD: Tensor, level: Level) -> LossInputs:
        """Return inputs with what metrics know of the truncated supports; unchanged without supports.

        At level full also whether a target is outside the support of the policy's own distribution, which takes one
        more GEMM with the head. Collective over tp.
        """
        row, ids_TK = self.row, self.row.extensions.get(SUPPORT)
        if ids_TK is None or level == "none":
            return inputs
        sizes_T, outside_T = (ids_TK >= 0).sum(dim=1), None
        sizes_T = torch.where(sizes_T == 0, policy.vocabulary_size, sizes_T).double()
        if level == "full" and self.sampling.truncates:
            head = {name: value for name, value in policy.head_arguments().items() if name != "keep_bytes"}
            temperature = row.extensions.get("temperature_T", policy.temperature)
            hidden_TD = policy.head_input(hidden_TD).detach()
            outside_T = outside_support(
                hidden_TD, targets_T=row.targets_T, sampling=self.sampling, temperature=temperature, **head
            )
        return replace(inputs, support_size_T=sizes_T, outside_support_T=outside_T)


def pack_step(
    batch: RolloutBatch, spec: RunSpec, document_rows: Sequence[Sequence[int]] | None = None
) -> list[RolloutBatch]:
    """Pack the rows of one optimizer step: those of the first dp rank, then those of the second, ...

    ``document_rows`` has the numbers of each row's documents, a multiple of dp rows; None: `pack` or `fill` deals them.

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
    multiple_of = check_row_multiple(data, layout, spec.reproducible)
    if document_rows is not None:
        return deal(batch, document_rows, multiple_of=multiple_of, document_multiple_of=needed.document)
    labels_N = batch.group_ids_N if data.keep_groups or spec.loss.needs_pairs else None
    if data.micro_batch_tokens is None:
        return pack(
            batch,
            rows=layout.dp * data.micro_batches,
            multiple_of=multiple_of,
            document_multiple_of=needed.document,
            group_labels_N=labels_N,
            balance=data.balance,
        )
    return fill(
        batch,
        tokens=data.micro_batch_tokens,
        ranks=layout.dp,
        multiple_of=multiple_of,
        document_multiple_of=needed.document,
        group_labels_N=labels_N,
    )


def plan_row(document_ids_T: Tensor, layout: LayoutSpec) -> ShardPlan:
    """Return the shard plan of a packed row over cp, given its document ids [T]."""
    return ShardPlan.make(
        layout.order if layout.cp > 1 else "contiguous",
        num_tokens=len(document_ids_T),
        cp=layout.cp,
        document_lengths=document_lengths(document_ids_T, multiples(layout).document),
        block_tokens=layout.block_tokens,
    )


def row_numbers(rows: Sequence[TrainingRow]) -> list[int]:
    """Return the place of each row in the order of the rows' first targets in the source batch; empty rows come last.

    Independent of the layout: of the rank that holds a row, and of the grouping of rows into micro-batches.
    """

    def first(row: TrainingRow) -> float:
        targets = row.source_T[row.source_T != PADDING]
        return int(targets.min()) if len(targets) else math.inf

    order = sorted(range(len(rows)), key=lambda at: first(rows[at]))
    return [order.index(at) for at in range(len(rows))]


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
        # On the device: a fused pass selects from them for every chunk, and would wait for the device each time.
        DocumentSums.of_row(row, plan.positions(axis.rank).to(mesh.device), axis=axis, complete=sum_sum),
        documents,
    )


def at_targets(values_S: Tensor | None, row: TrainingRow) -> Tensor | None:
    """[T] values of each target from those of the source batch, False where nothing counts; None stays None."""
    if values_S is None:
        return None
    return values_S.to(row.source_T.device)[row.source_T.clamp_min(0)] & row.loss_mask_T


def recorded_values(loss: Loss, inputs: LossInputs, terms: Mapping[str, Term], row: TrainingRow) -> dict[str, Tensor]:
    """Per-token values for a record: "clipped" is the decision applied, "would_clip" this run's own decision."""
    with torch.no_grad():
        own_terms = terms if inputs.frozen_clip_T is None or not terms else loss(replace(inputs, frozen_clip_T=None))
    none_T = torch.zeros_like(row.loss_mask_T)
    applied_T, own_T = (
        next((t.clipped_T for t in named.values() if t.clipped_T is not None), none_T) for named in (terms, own_terms)
    )
    assert inputs.entropy_T is not None, "among the head outputs of every loss"
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
    """Gather per-token values of all dp x cp ranks, each at the position of its target in the source batch.

    Of a pipeline those of the last stage, on all stages; other stages pass none.
    """
    ordered = _ordered(per_token, mesh, num_source) if per_token else {}
    return {name: values_S.cpu() for name, values_S in share_tensors(ordered, mesh).items()}


def _ordered(per_token: Sequence[Mapping[str, Tensor]], mesh: Mesh, num_source: int) -> dict[str, Tensor]:
    """`in_source_order` of the ranks that have values, on the device."""
    local = {name: torch.cat([tokens[name] for tokens in per_token]).to(mesh.device) for name in per_token[0]}
    pieces = gather_many(list(local.values()), mesh["dp_cp"])
    gathered = {name: torch.cat(of_ranks) for name, of_ranks in zip(local, pieces, strict=True)}
    source = gathered.pop("source")
    is_token = source != PADDING  # source positions name tokens in every packing (DECISIONS.md, row 8)
    ordered = {}
    for name, values_T in gathered.items():
        values_S = values_T.new_zeros(num_source)
        values_S[source[is_token]] = values_T[is_token]
        ordered[name] = values_S
    return ordered
