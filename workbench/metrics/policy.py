"""Metrics of the policy in a step: ratio, clipping, KL, entropy, advantages, correction weights.

One pass over declarations (`workbench.metrics.definitions`): the columns that they need are stacked, masked and summed
under every weight with one GEMM; extremes with one maximum. Nothing waits for the device; numbers are read when
`workbench.metrics.values.finish_metrics` merges micro-batches and ranks.

Letters: T packed tokens | N documents of the step | K parts that add | M parts of which the largest counts | W weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.document_sums import DocumentSums
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.definitions import LEVELS, AnyMetric, DocumentMetric, Level, Metric, declared
from workbench.metrics.quantities import POLICY_NAMES, ClipRule, Column, DocumentSlots, clip_rule
from workbench.metrics.values import Power, Reducer, Value
from workbench.specs.losses import LossSpec

Quantity = TypeVar("Quantity")


def policy_metrics(
    inputs: LossInputs,
    terms: Mapping[str, Term],
    loss_mask_T: Tensor,
    level: Level = "basic",
    loss_spec: LossSpec | None = None,
    slots: DocumentSlots | None = None,
) -> dict[str, Value]:
    """Compute the unfinished metrics of one micro-batch on one rank. The same keys on every rank, tokens or not.

    The keys depend on the level, the loss and the log-probabilities of the batch, never on the tokens of a
    micro-batch. Without ``loss_spec``, which has the bounds of the clip, metrics of the clip region are left out,
    without ``slots`` those of whole documents.

    Raises:
        SpecError: another level.
    """
    if level not in LEVELS:
        raise SpecError(f"record.metrics = {level!r}", rule=f"one of {', '.join(LEVELS)}", fix="correct the spec")
    if level == "none":
        return {}
    clip = clip_rule(loss_spec)
    chosen = declared(tuple(name for name, term in terms.items() if term.clipped_T is not None), clip)
    return measure(
        (metric for metric in chosen if LEVELS.index(metric.level) <= LEVELS.index(level)),
        Quantities(inputs, terms, loss_mask_T, clip=clip, slots=slots),
    )


def measure(metrics: Iterable[AnyMetric], q: Quantities) -> dict[str, Value]:
    """Compute the declared metrics of one micro-batch, unfinished; those without their quantities are left out."""
    with torch.no_grad():
        known = [metric for metric in metrics if _is_known(metric, q)]
        plain = [metric for metric in known if isinstance(metric, Metric) and metric.reducer.plain]
        totals = _totals(plain, q)
        extremes = _extremes(plain, q)
        values = {}
        for metric in known:
            if isinstance(metric, DocumentMetric):
                values[metric.key] = _of_documents(metric, q)
            elif metric.reducer.plain:
                values[metric.key] = Value(
                    metric.reducer,
                    tuple(totals[metric.column, power][metric.weight] for power in metric.reducer.powers),
                    tuple(extremes[metric.column, sign] for sign in metric.reducer.signs),
                )
            else:
                values[metric.key] = metric.reducer.over(
                    _known(q.column(metric.column)), q.population(metric.column), q.weights(metric.weight)
                )
    return values


def _totals(metrics: list[Metric], q: Quantities) -> dict[tuple[Column, Power], dict[str, Tensor]]:
    """Compute every sum that the metrics need: one stack, one mask, one GEMM. [K, T] @ [T, W]."""
    needed = list(dict.fromkeys((metric.column, power) for metric in metrics for power in metric.reducer.powers))
    weights = list(dict.fromkeys(metric.weight for metric in metrics if metric.reducer.powers))
    if not needed:
        return {}
    rows_KT = torch.stack([_power(q, column, power) for column, power in needed])
    masks_KT = torch.stack([q.population(column) for column, _ in needed])
    weights_TW = torch.stack([_known(q.weights(name)) for name in weights], dim=1)
    totals_KW = torch.where(masks_KT, rows_KT, 0.0) @ torch.where(q.mask_T[:, None], weights_TW, 0.0)
    return {
        each: dict(zip(weights, line.unbind(), strict=True))
        for each, line in zip(needed, totals_KW.unbind(), strict=True)
    }


def _extremes(metrics: list[Metric], q: Quantities) -> dict[tuple[Column, int], Tensor]:
    """Compute every maximum that the metrics need (a minimum is one of negated values): one stack, one mask. [M, T]."""
    needed = list(dict.fromkeys((metric.column, sign) for metric in metrics for sign in metric.reducer.signs))
    if not needed:
        return {}
    columns = [(_known(q.column(column)), sign) for column, sign in needed]
    rows_MT = torch.stack([column_T if sign > 0 else -column_T for column_T, sign in columns])
    masked_MT = torch.where(torch.stack([q.population(column) for column, _ in needed]), rows_MT, -torch.inf)
    if not masked_MT.shape[1]:
        masked_MT = masked_MT.new_full((len(needed), 1), -torch.inf)
    return dict(zip(needed, masked_MT.amax(1).unbind(), strict=True))


def _power(q: Quantities, column: Column, power: Power) -> Tensor:
    exponent, pivot = power
    if exponent == 0:
        return q.one_T
    values_T = _known(q.column(column))
    centred_T = values_T - pivot if pivot else values_T
    return centred_T.square() if exponent == 2 else centred_T


def _of_documents(metric: DocumentMetric, q: Quantities) -> Value:
    reducer = OfDocuments(metric.read, len(metric.columns), _known(q.slots).number, len(metric.extremes))
    columns, extremes = ([_known(q.column(each)) for each in of] for of in (metric.columns, metric.extremes))
    table = q.once(  # statistics of one quantity read one table
        ("table", metric.columns, metric.extremes),
        lambda: reducer.table(columns, q.population_of(metric.needs), _known(q.step_documents_T), extremes),
    )
    return replace(table, reducer=reducer)


def _is_known(metric: AnyMetric, q: Quantities) -> bool:
    if isinstance(metric, DocumentMetric):
        columns = (*metric.columns, *metric.extremes)
        return q.slots is not None and all(q.column(column) is not None for column in columns)
    return q.weights(metric.weight) is not None and q.column(metric.column) is not None


def _known(quantity: Quantity | None) -> Quantity:
    assert quantity is not None, "`measure` leaves out metrics without their quantities"
    return quantity


@dataclass(frozen=True)
class OfDocuments(Reducer):
    """A number of whole documents that may straddle ranks and micro-batches: a ratio of a document, say.

    Merged as a table: for each document of the step, its trained tokens, and the sums of some columns and the maxima
    of some others over them. Parts of a document on different ranks merge, so the only collectives are the one sum and
    the one maximum of all metrics.

    Attributes:
        read: see `DocumentMetric`.
        columns: number of columns that are summed.
        documents: N of the whole step.
        extremes: number of columns whose maximum is taken.
    """

    read: Callable[..., float] = field(compare=False)
    columns: int
    documents: int
    extremes: int = 0
    plain = False

    def table(
        self, columns: Sequence[Tensor], mask_T: Tensor, document_ids_T: Tensor, extremes: Sequence[Tensor] = ()
    ) -> Value:
        """Return the value from per-token columns; ``document_ids_T`` are the numbers of documents in the step."""
        rows = torch.stack([mask_T.double(), *(torch.where(mask_T, column_T.double(), 0.0) for column_T in columns)])
        # A table in the one sum of all metrics, instead of a collective per metric (DECISIONS.md, row 39).
        sums = rows.new_zeros(len(rows), self.documents)
        document_T = torch.where(mask_T, document_ids_T, 0)
        if self.documents:
            sums = sums.index_add(1, document_T, rows)
        if not extremes:
            return Value(self, (sums.reshape(-1),), ())
        lines = torch.stack([torch.where(mask_T, column_T.double(), -torch.inf) for column_T in extremes])
        largest = lines.new_full((len(lines), self.documents), -torch.inf)
        if self.documents:
            largest = largest.scatter_reduce(1, document_T.expand_as(lines), lines, "amax")
        return Value(self, (sums.reshape(-1),), (largest.reshape(-1),))

    def finish(self, sums: Sequence[Tensor], maxima: Sequence[Tensor]) -> float:
        """Apply ``read`` to the documents with trained tokens."""
        tokens_N, *columns = sums[0].view(1 + self.columns, self.documents)
        trained_N = tokens_N > 0
        if self.extremes:
            columns = [*columns, *maxima[0].view(self.extremes, self.documents)]
        return float(self.read(tokens_N[trained_N], *(column_N[trained_N] for column_N in columns)))

    def __str__(self) -> str:
        return "from a table of documents"


class Quantities:
    """Per-token quantities of a micro-batch on a rank, from the inputs and terms of its loss, each computed once."""

    def __init__(
        self,
        inputs: LossInputs,
        terms: Mapping[str, Term],
        loss_mask_T: Tensor,
        *,
        clip: ClipRule | None = None,
        slots: DocumentSlots | None = None,
    ) -> None:
        self.inputs, self.terms, self.mask_T = inputs, terms, loss_mask_T
        self.clip, self.slots = clip, slots
        self._cache: dict[Any, Any] = {}

    @cached_property
    def one_T(self) -> Tensor:
        """[T] of 1."""
        return torch.ones_like(self.mask_T, dtype=torch.float64)

    @cached_property
    def step_documents_T(self) -> Tensor | None:
        """[T] long, the token's document in the whole step; arbitrary at masked tokens. None if not known."""
        if self.slots is None:
            return None
        ids_T = self.inputs.document_ids_T
        return (torch.zeros_like(self.mask_T, dtype=torch.long) if ids_T is None else ids_T) + self.slots.first

    @cached_property
    def advantages_T(self) -> Tensor:
        """[T] float64."""
        return self.inputs.advantages_T.double()

    def logprob(self, policy: str) -> Tensor | None:
        """[T] float64 log-probabilities of one policy, or None."""
        values_T = getattr(self.inputs, f"{policy}_logprobs_T")
        return None if values_T is None else self.once(policy, lambda: values_T.detach().double())

    def log_ratio(self, above: str, below: str) -> Tensor | None:
        """[T] log(above / below), arbitrary where one of them is not finite; or None."""
        first_T, second_T = self.logprob(above), self.logprob(below)
        if first_T is None or second_T is None:
            return None
        return self.once((above, below), lambda: first_T - second_T)

    def ratio(self, above: str, below: str) -> Tensor | None:
        """[T] above / below, arbitrary where one of them is not finite; or None."""
        log_T = self.log_ratio(above, below)
        return None if log_T is None else self.once(("ratio", above, below), log_T.exp)

    def finite(self, policies: tuple[str, ...]) -> Tensor:
        """[T] bool: these policies' log-probabilities are all finite."""
        first, *others = policies
        if not others:
            return self._finite[first]
        return self.once(("finite", *sorted(policies)), lambda: self.finite(tuple(others)) & self._finite[first])

    @cached_property
    def _finite(self) -> dict[str, Tensor]:
        """[T] bool of each policy; all in one test, because each small operation costs a launch."""
        known = {name: each_T for name in POLICY_NAMES if (each_T := self.logprob(name)) is not None}
        return dict(zip(known, torch.stack(list(known.values())).isfinite().unbind(), strict=True))

    def population(self, column: Column) -> Tensor:
        """[T] bool: the trained tokens at which a column exists."""
        return self.population_of(column.needs)

    def population_of(self, needs: tuple[str, ...]) -> Tensor:
        """[T] bool: the trained tokens whose log-probabilities under all of these policies are finite."""
        needed = tuple(sorted(set(needs)))
        if not needed:
            return self.mask_T
        return self.once(("population", *needed), lambda: self.mask_T & self.finite(needed))

    def weights(self, name: str) -> Tensor | None:
        """[T] token weights: 1, or 1 / the trained tokens of the token's document or segment; or None."""
        if name == "token":
            return self.one_T
        lengths_T = self.once(("lengths", name), lambda: self._lengths(name))
        if lengths_T is None:
            return None
        return self.once(("weights", name), lambda: lengths_T.double().clamp_min(1).reciprocal())

    def _lengths(self, name: str) -> Tensor | None:
        """[T] trained tokens of the token's document or segment: from the inputs, or counted if the row is whole."""
        inputs = self.inputs
        lengths_T = inputs.lengths_T if name == "document" else self.slots and self.slots.segment_lengths_T
        if lengths_T is not None or inputs.sums is not None or inputs.document_ids_T is None:
            return lengths_T
        sums = DocumentSums(inputs.document_ids_T, self.mask_T)
        return sums.document(self.one_T) if name == "document" else sums.segment(self.one_T)

    def extra(self, name: str) -> Tensor | None:
        """[T] float64, a value that the policy term returned under a name, or None."""
        term = self.terms.get("policy")
        value_T = None if term is None else term.extras.get(name)
        return None if value_T is None else value_T.detach().double()

    def column(self, column: Column) -> Tensor | None:
        """[T] float64, computed at most once."""
        return self.once(column, lambda: column.of(self))

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """A value of a key, computed at most once."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]
