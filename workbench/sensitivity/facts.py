"""Facts of a dataset, of settings, and of a clean run, from which hidden faults are predicted.

All of them are known before any fault is planted: counts of the documents of each step, of their rows and shards, and
what the loss of the clean run has met (clipped tokens, distance from the reference policy).

Letters: T packed tokens | N documents | S tokens of the source batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise

import torch
from torch import Tensor

from workbench.records.directory import RunDirectory
from workbench.reduction.weights import compute_advantages
from workbench.rollouts.batch import PADDING, RolloutBatch
from workbench.rollouts.places import places_of_each
from workbench.rollouts.targets import TrainingRow, shift_targets
from workbench.sharding.divisibility import multiples
from workbench.specs.run import RunSpec
from workbench.train.rows import in_order, pack_step, plan_row

BELOW_FLOAT64 = 1e-5
"""Relative changes below it are within the budgets of float32 and below, 3.5 times a rounding error of about 1e-6."""
SAME = 1e-9
"""Numbers closer than this are the same for a prediction: a thousand times the bar of float64 parity, 1e-12, and a
thousandth of what a float32 file keeps."""


@dataclass(frozen=True)
class RowFacts:
    """Facts of one packed row of a step.

    Attributes:
        documents: in the row; ``trained_documents`` of them have a trained token.
        tokens: trained ones.
        shard_tokens: trained ones on each cp rank.
        split_documents: trained documents of which several cp ranks have tokens up to the last trained one, so that
            its attention spans ranks; ``spread_documents`` those of which they have any tokens.
        reached: cp ranks with such a token: all those that a gradient comes from.
        torn_documents: trained documents of which a cp rank has pieces that are not adjacent.
        later_documents: trained documents behind another one.
        varied_shards: cp ranks whose trained tokens have different advantages.
        padding: tokens of no document.
        followed_ends: documents whose last token trains, directly before another document.
    """

    documents: int
    trained_documents: int
    tokens: int
    shard_tokens: tuple[int, ...]
    split_documents: int
    torn_documents: int
    later_documents: int
    varied_shards: int
    reached: frozenset[int]
    spread_documents: int
    padding: int
    followed_ends: int


@dataclass(frozen=True)
class StepFacts:
    """Facts of the documents of one optimizer step.

    Attributes:
        rows: all packed rows, of all ranks.
        lengths: trained tokens of each document.
        holes: documents with an untrained token between trained ones.
        open_ends: trained documents whose last token does not train.
        trained_ends: trained documents whose last token trains, and that were not truncated.
        prompt_tokens: trained tokens of each prompt; () without group ids.
        prompt_documents: trained documents of each prompt.
        groups_in_place: True if documents in their order, dealt to prompts in equal shares, are the groups.
        untrained_with_others: documents without trained tokens whose prompt has others.
        varied_advantages: True if trained tokens have different advantages.
        any_advantage: True if one of them is not zero.
        misdealt_advantages: True if a trained document is in another place of the rows than of the batch, and the
            document of that place has another advantage; 0 without a trained token.
        regrouped_advantages: True if prompts of equal size, one after another, give trained tokens other advantages.
        own_baselines: True if the baselines and deviations of each row's own documents give other advantages.
        scaled_advantages: relative change of the advantages if rewards are doubled: 1 for a baseline alone, about half
            an epsilon where a deviation divides, 0 for recorded ones.
        padded_documents: documents whose length the layout pads.
        in_order: True if rows have the documents in the order of the batch.
        split_groups: prompts whose documents are in several rows.
        rollouts_of_several: rollouts of several documents.
        has_sampler: True if the sampler's log-probabilities are known; ``has_reference`` likewise.
        least_weight: of old / sampler over trained tokens, and ``largest_weight``; both 1 without a sampler.
    """

    rows: tuple[RowFacts, ...]
    lengths: tuple[int, ...]
    holes: int
    open_ends: int
    trained_ends: int
    prompt_tokens: tuple[int, ...]
    prompt_documents: tuple[int, ...]
    groups_in_place: bool
    untrained_with_others: int
    varied_advantages: bool
    any_advantage: bool
    misdealt_advantages: bool
    regrouped_advantages: bool
    own_baselines: bool
    scaled_advantages: float
    padded_documents: int
    in_order: bool
    split_groups: int
    rollouts_of_several: int
    has_sampler: bool
    has_reference: bool
    least_weight: float
    largest_weight: float

    @property
    def untrained(self) -> int:
        """Documents without a trained token."""
        return sum(length == 0 for length in self.lengths)


@dataclass(frozen=True)
class Observed:
    """Facts of the loss of a clean run, over all its steps.

    Attributes:
        clipped: trained tokens whose gradient the clip removed; ``clipped_below`` of them at the lower bound.
        ratio_below: highest policy / old policy of a token clipped at the lower bound; 0 without one.
        old_distance: largest |log(policy / old policy)| of a trained token, nats.
        largest_norm: largest global gradient norm.
        finite: False if a loss or a gradient norm was not finite.
        ratios_of_parts: relative change of the loss's gradient if each rank takes a document's ratio over its own part;
            see `workbench.sensitivity.parts`.
    """

    clipped: int
    clipped_below: int
    ratio_below: float
    old_distance: float
    largest_norm: float
    finite: bool
    ratios_of_parts: float = 0.0


@dataclass(frozen=True)
class Facts:
    """Facts of one configuration.

    Attributes:
        spec: its settings.
        steps: of the documents of each step; equal steps once.
        observed: of its clean run.
        vocabulary: number of tokens.
        key_heads: key-value heads of the decoder, and ``experts`` of each of its layers; 0 without a mixture.
        temperature: at which the policy's log-probabilities are computed.
        sinks: True if its attention has sinks.
        tied: True if its head is the embedding.
    """

    spec: RunSpec
    steps: tuple[StepFacts, ...]
    observed: Observed
    vocabulary: int
    key_heads: int
    experts: int
    temperature: float
    sinks: bool = False
    tied: bool = True

    @property
    def resolution(self) -> float:
        """Relative changes of a gradient that the budgets of the run's precision accept."""
        return SAME if self.spec.precision == "float64" else BELOW_FLOAT64

    def any_step(self, holds: Callable[[StepFacts], bool]) -> bool:
        """True if a step has a property."""
        return any(holds(step) for step in self.steps)

    def any_row(self, holds: Callable[[RowFacts], bool]) -> bool:
        """True if a row of a step has a property."""
        return any(holds(row) for step in self.steps for row in step.rows)


def step_facts(batch: RolloutBatch, spec: RunSpec) -> tuple[StepFacts, ...]:
    """Return the facts of the documents of every step of a run, each once."""
    documents = islice(in_order(batch, spec.data.documents_per_step), spec.steps)
    return tuple(dict.fromkeys(_of_step(step, spec) for step in _distinct(documents)))


def _distinct(steps: islice[RolloutBatch]) -> list[RolloutBatch]:
    """Steps that are not the previous one again."""
    taken: list[RolloutBatch] = []
    for step in steps:
        if not taken or step is not taken[-1]:
            taken.append(step)
    return taken


def _of_step(batch: RolloutBatch, spec: RunSpec) -> StepFacts:
    rewarded, batch = batch, compute_advantages(batch, spec)
    packed = pack_step(batch, spec)
    numbers = range(batch.num_documents)
    places = places_of_each(batch.document_ids_T)
    masks = [batch.loss_mask_T[places[number]] for number in numbers]
    lengths = [int(mask.sum()) for mask in masks]
    cut = batch.extensions.get("truncated")
    truncated = [False] * len(masks) if cut is None else _by_document(batch, cut.values)
    groups = [] if batch.group_ids_N is None else batch.group_ids_N.tolist()
    rollouts = batch.extensions.get("rollout_ids")
    advantages = batch.advantages_T[batch.loss_mask_T].double()
    weights = [1.0]
    if batch.sampler_logprobs_T is not None and len(advantages):
        log_weight_T = batch.old_logprobs_T.double() - batch.sampler_logprobs_T.double()
        weights = log_weight_T[batch.loss_mask_T].exp().tolist()
    order = [_documents_of(batch, row) for row in packed]
    rows_of = Counter(group for row in order for group in {groups[number] for number in row} if groups)
    trained_in = Counter(group for group, length in zip(groups, lengths, strict=False) if length)
    flat = [number for row in order for number in row]
    unit = multiples(spec.layout).document
    return StepFacts(
        rows=tuple(_of_row(shift_targets(row), row, spec) for row in packed),
        lengths=tuple(lengths),
        holes=sum(_has_hole(mask) for mask in masks),
        open_ends=sum(bool(mask.any()) and not bool(mask[-1]) for mask in masks),
        trained_ends=sum(bool(mask[-1]) and not cut for mask, cut in zip(masks, truncated, strict=True)),
        prompt_tokens=tuple(_sums(groups, lengths)),
        prompt_documents=tuple(_sums(groups, [int(length > 0) for length in lengths])),
        groups_in_place=_in_place(groups),
        untrained_with_others=sum(
            length == 0 and trained_in[group] > 0 for group, length in zip(groups, lengths, strict=False)
        ),
        varied_advantages=bool(len(advantages)) and float(advantages.max() - advantages.min()) > SAME,
        any_advantage=bool((advantages.abs() > SAME).any()),
        misdealt_advantages=_misdealt(flat, masks, [batch.advantages_T[places[number]] for number in numbers]),
        regrouped_advantages=_regrouped(rewarded, batch, spec),
        own_baselines=any(_differs(compute_advantages(row, spec), row) for row in packed),
        scaled_advantages=_change_if_doubled(rewarded, batch, spec),
        padded_documents=sum(int(length) % unit != 0 for length in batch.lengths_N.tolist()),
        in_order=flat == sorted(flat),
        split_groups=sum(rows > 1 for rows in rows_of.values()),
        rollouts_of_several=0 if rollouts is None else len(rollouts.values) - len(rollouts.values.unique()),
        has_sampler=batch.sampler_logprobs_T is not None,
        has_reference=batch.ref_logprobs_T is not None,
        least_weight=min(weights),
        largest_weight=max(weights),
    )


def _misdealt(order: Sequence[int], masks: Sequence[Tensor], advantages: Sequence[Tensor]) -> bool:
    """True if a trained document gets another advantage if advantages are dealt to places in the order of arrival."""
    own = [float(values[mask][-1]) if bool(mask.any()) else 0.0 for values, mask in zip(advantages, masks, strict=True)]
    return any(bool(masks[number].any()) and abs(own[place] - own[number]) > SAME for place, number in enumerate(order))


def _regrouped(rewarded: RolloutBatch, batch: RolloutBatch, spec: RunSpec) -> bool:
    """True if groups by position, as many as there are prompts, give trained tokens other advantages."""
    if batch.group_ids_N is None or spec.data.advantages.name == "recorded":
        return False
    size = max(batch.num_documents // len(batch.group_ids_N.unique()), 1)
    placed = replace(rewarded, group_ids_N=torch.arange(batch.num_documents) // size)
    return _differs(compute_advantages(placed, spec), batch)


def _differs(batch: RolloutBatch, other: RolloutBatch) -> bool:
    """True if a trained token has another advantage."""
    change_T = batch.advantages_T - other.advantages_T
    return bool((change_T[other.loss_mask_T].abs() > SAME).any())


def _change_if_doubled(rewarded: RolloutBatch, batch: RolloutBatch, spec: RunSpec) -> float:
    """Relative change of the advantages of trained tokens if all rewards are twice as high; 0 if they are all 0."""
    if rewarded.rewards_N is None or spec.data.advantages.name == "recorded":
        return 0.0
    doubled = compute_advantages(replace(rewarded, rewards_N=2 * rewarded.rewards_N), spec).advantages_T.double()
    own = batch.advantages_T.double()[batch.loss_mask_T]
    largest = float(own.abs().max()) if len(own) else 0.0
    return float((doubled[batch.loss_mask_T] - own).abs().max()) / largest if largest else 0.0


def _by_document(batch: RolloutBatch, values: Tensor) -> list[bool]:
    """A flag of each document, from a field of tokens or of documents."""
    if len(values) == batch.num_documents:
        return [bool(value) for value in values]
    places = places_of_each(batch.document_ids_T)
    return [bool(values[places[number]].any()) for number in range(batch.num_documents)]


def _documents_of(batch: RolloutBatch, row: RolloutBatch) -> list[int]:
    """Numbers, in the batch, of the documents of a packed row."""
    document_S = torch.full((int(batch.source_T.max()) + 1,), -1)
    document_S[batch.source_T] = batch.document_ids_T
    places = places_of_each(row.document_ids_T)
    firsts = [row.source_T[places[number][0]] for number in range(row.num_documents)]
    return [int(document_S[first]) for first in firsts]


def _of_row(targets: TrainingRow, row: RolloutBatch, spec: RunSpec) -> RowFacts:
    owner_T = torch.zeros(len(targets.loss_mask_T), dtype=torch.long)
    plan, cp = plan_row(row.document_ids_T, spec.layout), spec.layout.cp
    for rank in range(cp):
        owner_T[plan.positions(rank)] = rank
    places = places_of_each(row.document_ids_T)
    trained = [number for number in range(row.num_documents) if bool(row.loss_mask_T[places[number]].any())]
    reached = [_ranks_reached(owner_T[places[n]], targets.loss_mask_T[places[n]]) for n in trained]
    split = sum(len(ranks) > 1 for ranks in reached)
    tokens = tuple(int((targets.loss_mask_T & (owner_T == rank)).sum()) for rank in range(cp))
    torn = sum(_is_torn(owner_T[places[number]].tolist()) for number in trained)
    padding = int((row.document_ids_T == PADDING).sum())
    shards = [targets.advantages_T[targets.loss_mask_T & (owner_T == rank)] for rank in range(cp)]
    varied = sum(bool(len(shard)) and float(shard.max() - shard.min()) > SAME for shard in shards)
    later = sum(number > 0 for number in trained)
    spread = sum(len(owner_T[places[number]].unique()) > 1 for number in trained)
    ranks = frozenset[int]().union(*reached)
    inner = [number for number in trained if number < row.num_documents - 1]
    followed = sum(bool(row.loss_mask_T[places[number][-1]]) for number in inner)
    counts = row.num_documents, len(trained), sum(tokens), tokens, split, torn
    return RowFacts(*counts, later, varied, ranks, spread, padding, followed)


def _ranks_reached(owner_T: Tensor, mask_T: Tensor) -> frozenset[int]:
    """Ranks with tokens of one document [T] up to its last trained one; ``mask_T`` is that of the next token."""
    trained = torch.nonzero(mask_T).squeeze(1)
    last = int(trained[-1]) if len(trained) else -1
    return frozenset(owner_T[: last + 1].tolist())


def _is_torn(owners: Sequence[int]) -> bool:
    """True if a rank owns tokens of a document on both sides of another rank's."""
    pieces = [rank for rank, _ in groupby(owners)]
    return len(pieces) > len({*pieces})


def _has_hole(mask: Tensor) -> bool:
    trained = torch.nonzero(mask).squeeze(1).tolist()
    return any(after != before + 1 for before, after in pairwise(trained))


def _sums(labels: Sequence[int], values: Sequence[int]) -> list[int]:
    return [sum(v for each, v in zip(labels, values, strict=True) if each == label) for label in sorted({*labels})]


def _in_place(groups: Sequence[int]) -> bool:
    """True if every group has as many documents, next to each other."""
    if not groups:
        return True
    size = max(len(groups) // len({*groups}), 1)
    positions = [at // size for at in range(len(groups))]
    return len({*zip(groups, positions, strict=True)}) == len({*groups}) == len({*positions})


def observed(run: RunDirectory, ratios_of_parts: float = 0.0) -> Observed:
    """Return what the loss of a finished clean run has met."""
    clipped = below = 0
    ratio_below = 0.0
    distance, norms, finite = 0.0, [0.0], True
    for number, record in enumerate(run.steps()):
        tokens = run.read_tensors(f"step{number:04d}.tokens")
        trained, out = tokens["trained"], tokens["clipped"] & tokens["trained"]
        log_ratio = tokens["policy_logprobs"].double() - tokens["old_logprobs"].double()
        clipped, below = clipped + int(out.sum()), below + int((out & (log_ratio < 0)).sum())
        ratio_below = max([ratio_below, *log_ratio[out & (log_ratio < 0)].exp().tolist()])
        if bool(trained.any()):
            distance = max(distance, float(log_ratio[trained].abs().max()))
        values = [record.get(key) for key in ("loss/total/sum", "gradient/norm/global")]
        finite &= all(isinstance(value, float | int) and math.isfinite(value) for value in values)
        norms.append(float(record["gradient/norm/global"] or 0.0))
    return Observed(clipped, below, ratio_below, distance, max(norms), finite, ratios_of_parts)
