"""Metrics of other systems, under their names and by their definitions; one module per system declares them.

A name says little: `clip_ratio/region_mean` (TRL) looks at the sign of the advantage, `clipped_ratio_fraction`
(Fast-LLM) does not and is a mean over documents. So no metric here is a similar one renamed: each has its own
declaration and definition, and `Alias.canonical` names the workbench's key only if both are the same number on every
batch.

Read from the code and checked against numbers of Fast-LLM 7d61a1ba, TRL 1.16.0, verl 1dda039b, NeMo-RL 7ea279ab.
Numbers that these systems compute wrongly, or under a misleading name, are not reproduced: see `left_out`.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.definitions import AnyMetric, DocumentMetric, Metric, Weight, metric_table, statistic
from workbench.metrics.policy import Quantities, measure
from workbench.metrics.quantities import Advantage, ClipRule, Column, DocumentSlots, LogRatio, Region, beyond, clip_rule
from workbench.metrics.values import Mean, Reducer, Value
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import KLEstimator, LossSpec
from workbench.systems.registry import SYSTEMS, load_system

if TYPE_CHECKING:
    import pandas as pd


class PeerSettings(NamedTuple):
    """Settings that metric definitions of other systems depend on.

    Attributes:
        clip: the surrogate's clip; None: metrics of the clip are left out.
        kind: kind of surrogate, as `workbench.specs.losses` names it.
        num_documents: all documents of the step, also those in which nothing counts; what Fast-LLM, TRL's sequence
            metrics and NeMo divide by. None: those with trained tokens.
        kl_estimator: the estimator that the KL penalty uses; NeMo's error metrics take it too.
        of_documents: the surrogate's ratio, and a correction's weight, is one of a document.
        spec: the loss's settings; None: metrics that depend on them are left out.
        single: shares of documents are rounded to single precision, as in systems that average flags.
        only: prefixes of the names to report, if a function of the system reports only some; (): all.
        given: counts of the whole step, if only a part of it is present.
        token_advantages: the batch has one advantage per token, not per document, and the system's means follow that
            shape.
    """

    clip: ClipRule | None
    kind: str = "ppo"
    num_documents: int | None = None
    kl_estimator: KLEstimator = "k3"
    of_documents: bool = False
    spec: LossSpec | None = None
    single: bool = False
    only: tuple[str, ...] = ()
    given: GivenCounts = GivenCounts()
    token_advantages: bool = False


@dataclass(frozen=True)
class Alias:
    """A metric of another system; its key is the system's own name for it."""

    metric: AnyMetric
    canonical: str | None = None
    """The workbench's key of the same number; None: no canonical metric is the same on every batch."""
    note: str = ""
    """Difference from what the name suggests."""


def settings_of(loss_spec: LossSpec | None, slots: DocumentSlots | None = None) -> PeerSettings:
    """Return the settings that other systems' definitions need, from those of a loss."""
    clip, number = clip_rule(loss_spec), None if slots is None else slots.number
    if loss_spec is None:
        return PeerSettings(clip, num_documents=number)
    of_documents = clip is not None and clip.of_documents
    return PeerSettings(clip, loss_spec.surrogate.kind, number, loss_spec.kl.estimator, of_documents, loss_spec)


def left_out() -> dict[tuple[str, str], str]:
    """Map (system, name) to what that system reports there in some case, and what is reported here instead."""
    return {(system, name): why for system in SYSTEMS for name, why in load_system(system).left_out.items()}


def as_named_by(
    system: str,
    inputs: LossInputs,
    loss_mask_T: Tensor,
    *,
    terms: Mapping[str, Term] | None = None,
    loss_spec: LossSpec | None = None,
    slots: DocumentSlots | None = None,
    settings: PeerSettings | None = None,
) -> dict[str, Value]:
    """Return one micro-batch's metrics as another system names and defines them, unfinished.

    They merge like all others: `workbench.metrics.values.finish_metrics`, alone or together with `policy_metrics`.
    Names whose quantities the batch does not have (no sampler, no reference, no clip) are left out.

    Args:
        system: one of `SYSTEMS`.
        inputs: inputs of the loss.
        loss_mask_T: [T] bool, the population.
        terms: terms of the loss; corrections keep their weights there.
        loss_spec: the loss's settings.
        slots: names of the row's documents in the whole step; needed by numbers of whole documents.
        settings: settings of the definitions; None: derived from ``loss_spec`` and ``slots``.

    Raises:
        SpecError: unknown system, or a sequence-level loss without ``slots``.
    """
    settings = settings or settings_of(loss_spec, slots)
    if settings.of_documents and slots is None:
        raise SpecError(
            f"metrics as {system} names them, for a loss of kind {settings.kind!r}",
            found="no slots",
            rule="a ratio of documents needs the names of the documents in the step",
            fix="pass slots=DocumentSlots(first, number)",
        )
    q = Quantities(inputs, terms or {}, loss_mask_T, clip=settings.clip, slots=slots)
    return measure((alias.metric for alias in aliases(system, settings)), q)


def aliases(system: str, settings: PeerSettings) -> tuple[Alias, ...]:
    """Return every metric of a system with its definition, for a loss."""
    return tuple(load_system(system).aliases(settings))


def alias_table(system: str, settings: PeerSettings | None = None) -> pd.DataFrame:
    """Tabulate a system's metrics: definitions, and the canonical key of the same number. One row per name."""
    settings = settings or PeerSettings(ClipRule(0.8, 1.2, 3.0))
    chosen = aliases(system, settings)
    frame = metric_table([alias.metric for alias in chosen]).drop(columns="level")
    frame.insert(0, "canonical", [alias.canonical or "" for alias in chosen])
    frame["note"] = [alias.note for alias in chosen]
    return frame


# ---- declarations ----------------------------------------------------------------------------------------------


def token_metric(
    key: str,
    meaning: str,
    unit: str,
    column: Column,
    reducer: Reducer | None = None,
    weight: Weight = "token",
    *,
    canonical: str | None = None,
    note: str = "",
) -> Alias:
    """Declare a metric of tokens, see `Metric`: their mean, unless another reducer is given."""
    return Alias(Metric(key, meaning, unit, column, reducer or Mean(), weight), canonical, note)


def document_metric(
    key: str,
    meaning: str,
    unit: str,
    columns: tuple[Column, ...],
    read: Callable[..., float],
    *,
    extremes: tuple[Column, ...] = (),
    by_length: bool = False,
    canonical: str | None = None,
    note: str = "",
) -> Alias:
    """Declare a metric of whole documents, see `DocumentMetric`; ``by_length``: each weighs its trained tokens."""
    weight = "its trained tokens" if by_length else "1 a document"
    return Alias(DocumentMetric(key, meaning, unit, columns, read, weight, extremes=extremes), canonical, note)


def per_document(
    key: str, meaning: str, make: Callable[..., Tensor], reduce: str, of: float | None = None, note: str = ""
) -> Alias:
    """Declare a statistic of a function of each document's log ratio (policy / old) and advantage."""
    columns = LogRatio("policy", "old"), Advantage()
    return document_metric(key, meaning, "1", columns, functools.partial(reduced, make, reduce, of), note=note)


@dataclass(frozen=True)
class Derived(Column):
    """A function of other columns, token by token; missing where one of them is."""

    make: Callable[..., Tensor]
    columns: tuple[Column, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Column.needs`."""
        return tuple(dict.fromkeys(name for column in self.columns for name in column.needs))

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        values = [q.column(column) for column in self.columns]
        return None if any(value_T is None for value_T in values) else self.make(*values)


def negation(column: Column) -> Derived:
    """Return 1 less a column of flags."""
    return Derived(lambda flags_T: 1 - flags_T, (column,))


def has_sign(sign: int) -> Derived:
    """Return 1 where the advantage has a sign, else 0."""
    return Derived(lambda advantages_T: (advantages_T * sign > 0).double(), (Advantage(),))


def outside(column: Column, low: float | None = None, high: float | None = None) -> Derived:
    """Return 1 where a column is below one bound or above the other, else 0."""
    return Derived(functools.partial(is_outside, low, high), (column,))


def is_outside(low: float | None, high: float | None, value: Tensor) -> Tensor:
    """Return 1 where a value is below one bound or above the other, else 0."""
    below = torch.zeros_like(value, dtype=torch.bool) if low is None else value < low
    return (below if high is None else below | (value > high)).double()


# ---- numbers of one document -----------------------------------------------------------------------------------


def reduced(make: Callable[..., Tensor], reduce: str, of: float | None, tokens_N: Tensor, *sums_N: Tensor) -> float:
    """Return a statistic of a function of each document; a mean may count more documents than have tokens."""
    values_N = make(tokens_N, *sums_N)
    if reduce == "mean" and of is not None:
        return float(values_N.sum()) / of if of else math.nan
    return statistic(reduce, values_N)


def token_mean(
    make: Callable[..., Tensor],
    tokens_N: Tensor,
    *sums_N: Tensor,
    epsilon: float = 1e-8,
    of: float | None = None,
    least: float = 0.0,
) -> float:
    """Return the mean over tokens, at least ``least`` or over ``of`` tokens, of a function of their document."""
    weight = max((float(tokens_N.sum()) if of is None else of) + epsilon, least)
    return float((tokens_N * make(tokens_N, *sums_N)).sum()) / weight if weight else math.nan


def ratio_of(tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return the geometric mean of a document's ratios; epsilon is added to its length."""
    return (log_ratio_N / (tokens_N + epsilon)).exp()


def clamped_of(clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return the same, clamped to a clip."""
    return ratio_of(tokens_N, log_ratio_N, epsilon=epsilon).clamp(clip.lower, clip.upper)


def k3_of(tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor) -> Tensor:
    """Return the document's r - 1 - log r."""
    mean_N = log_ratio_N / tokens_N
    return torch.expm1(mean_N) - mean_N


def outside_clip_of(
    region: Region, clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, advantage_N: Tensor
) -> Tensor:
    """Return 1 where the document's ratio lies in a region of the clip, by the sign of its mean advantage."""
    return in_region(region, ratio_of(tokens_N, log_ratio_N), advantage_N / tokens_N, clip)


def in_region(region: Region, ratio: Tensor, advantages: Tensor, clip: ClipRule) -> Tensor:
    """Return 1 where a ratio lies in a region of a clip that has this bound, else 0; see `beyond`."""
    beyond_clip = beyond(region, ratio, advantages, clip)
    assert beyond_clip is not None, "only the dual bound can be missing"
    return beyond_clip.double()
