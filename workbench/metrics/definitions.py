"""Declarations of the metrics of a step: key, unit, population, weight and reducer, as data.

From these declarations metrics are computed (`workbench.metrics.policy`), listed (`metric_table`) and explained. Keys
are ``group/name/statistic``. The reducer is part of the declaration and is never derived from the key.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from workbench.metrics.quantities import (
    KL,
    POLICY_NAMES,
    Advantage,
    Clip,
    ClipRule,
    Column,
    Cut,
    Dropped,
    Entropy,
    Estimator,
    Extra,
    LogProb,
    LogRatio,
    NoGradient,
    NonFinite,
    One,
    PolicyName,
    Ratio,
    Region,
    Support,
    Truncated,
    beyond,
)
from workbench.metrics.values import (
    Count,
    Deviation,
    EffectiveSampleSize,
    LogMeanExp,
    Maximum,
    Mean,
    Minimum,
    Quantile,
    Reducer,
    SquaredSum,
    Sum,
)

if TYPE_CHECKING:
    import pandas as pd

Level = Literal["none", "basic", "full"]
LEVELS: tuple[Level, ...] = ("none", "basic", "full")
"""Metrics that are computed: none; the cheap ones; all."""

Weight = Literal["token", "document", "segment"]
WEIGHTS = {
    "token": "1 a token",
    "document": "1 / trained tokens of the token's document, so each document weighs 1",
    "segment": "1 / trained tokens of the token's unbroken run, so each run weighs 1",
}


@dataclass(frozen=True)
class Metric:
    """The declaration of a metric of a step.

    Attributes:
        key: ``group/name/statistic``, or another system's name for it.
        meaning: one sentence.
        unit: of the number.
        column: the per-token quantity.
        reducer: from per-token values to the number.
        weight: of a token.
        level: the lowest level at which it is computed.
    """

    key: str
    meaning: str
    unit: str
    column: Column
    reducer: Reducer
    weight: Weight = "token"
    level: Level = "basic"

    @property
    def population(self) -> str:
        """Description of the tokens."""
        return _population(self.column.needs)


@dataclass(frozen=True)
class DocumentMetric:
    """The declaration of a metric of whole documents. Needs `quantities.DocumentSlots`.

    Attributes:
        key: see `Metric`.
        meaning: one sentence.
        unit: of the number.
        columns: per-token quantities, summed over each document's trained tokens.
        read: returns the number from tokens_N, one sum_N per column and one maximum_N per extreme, of documents with
            trained tokens.
        weight: description of a document's weight.
        level: see `Metric`.
        extremes: per-token quantities whose maximum is taken over each document's trained tokens.
    """

    key: str
    meaning: str
    unit: str
    columns: tuple[Column, ...]
    read: Callable[..., float]
    weight: str = "1 a document"
    level: Level = "full"
    extremes: tuple[Column, ...] = ()

    @functools.cached_property
    def needs(self) -> tuple[str, ...]:
        """The policies whose log-probabilities it needs."""
        return tuple(dict.fromkeys(name for column in (*self.columns, *self.extremes) for name in column.needs))

    @property
    def population(self) -> str:
        """Description of the documents."""
        return f"documents with {_population(self.needs)}"


AnyMetric = Metric | DocumentMetric


def _population(needs: Iterable[str]) -> str:
    named = " and ".join(needs)
    return f"trained tokens with finite {named} log-probability" if named else "trained tokens"


def metric_table(metrics: Sequence[AnyMetric] | None = None) -> pd.DataFrame:
    """Return every metric with its meaning, unit, population, weight, reducer and level; one row per key.

    By default the canonical ones of a loss whose term "policy" clips.
    """
    import pandas as pd

    metrics = declared(("policy",)) if metrics is None else metrics
    return pd.DataFrame(
        [
            {
                "key": metric.key,
                "meaning": metric.meaning,
                "unit": metric.unit,
                "population": metric.population,
                "weight": WEIGHTS[metric.weight] if isinstance(metric, Metric) else metric.weight,
                "reducer": str(metric.reducer) if isinstance(metric, Metric) else "from a table of documents",
                "level": metric.level,
            }
            for metric in metrics
        ]
    ).set_index("key")


# ---- metrics of documents ------------------------------------------------------------------------------


STATISTICS: Mapping[str, tuple[str, Reducer]] = {
    "mean": ("mean of", Mean()),
    "std": ("standard deviation of", Deviation(1.0)),
    "min": ("smallest of", Minimum()),
    "max": ("largest of", Maximum()),
    "sum": ("sum of", Sum()),
    "squared_sum": ("sum of squares of", SquaredSum()),
    "effective_samples": ("effective sample size of", EffectiveSampleSize()),
}
"""Last part of a key -> its description, and its reducer for numbers near 1."""


def document_ratio(reduce: str, above: PolicyName = "policy", below: PolicyName = "old") -> DocumentMetric:
    """Declare a statistic of the documents' ratios, each exp of its mean log ratio (as GSPO defines it)."""
    effective = reduce == "effective_samples"
    meaning = "effective sample size, in documents, of" if effective else STATISTICS[reduce][0]
    return DocumentMetric(
        f"ratio_document/{above}_{below}/{reduce}",
        f"{meaning} the documents' ratios {above} / {below}, each exp(mean log ratio of its trained tokens)",
        "documents" if effective else "1",
        (LogRatio(above, below),),
        lambda tokens_N, log_ratio_N: statistic(reduce, (log_ratio_N / tokens_N).exp()),
    )


_OF_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "squared_sum": lambda values_N: values_N.square().sum(),
    "min": torch.min,
    "max": torch.max,
    "std": lambda values_N: values_N.std(correction=0),
    "effective_samples": lambda values_N: values_N.sum() ** 2 / values_N.square().sum(),
}
_OF_NOTHING = {"sum": 0.0, "squared_sum": 0.0, "min": float("inf"), "max": float("-inf")}


def statistic(reduce: str, values_N: Tensor) -> float:
    """Return an unweighted statistic of one number per document; NaN or the identity for no documents."""
    if not values_N.numel():
        return _OF_NOTHING.get(reduce, float("nan"))
    return float(_OF_VALUES.get(reduce, torch.mean)(values_N))


def document_clip(region: Region, key: str, meaning: str, clip: ClipRule, level: Level = "basic") -> DocumentMetric:
    """Declare the share of trained tokens whose document's ratio is beyond the clip of a sequence-level surrogate.

    The sign is that of the document's mean advantage.
    """
    return DocumentMetric(
        key,
        f"{meaning}, judged by the document's ratio and mean advantage",
        "1",
        (LogRatio("policy", clip.anchor), Advantage()),
        functools.partial(_clipped_share, region, clip),
        weight="its trained tokens",
        level=level,
    )


def _clipped_share(region: Region, clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, advantage_N: Tensor) -> float:
    beyond_N = beyond(region, (log_ratio_N / tokens_N).exp(), advantage_N / tokens_N, clip)
    total = float(tokens_N.sum())
    if beyond_N is None or not total:
        return float("nan")
    return float(torch.where(beyond_N, tokens_N, 0.0).sum()) / total


# ---- the canonical set ---------------------------------------------------------------------------------

CLIP_REGIONS: tuple[tuple[Region, str, str, Level], ...] = (
    ("outside", "region", "whose ratio lies outside the clip, for either sign of the advantage", "basic"),
    (
        "cut",
        "sign_aware",
        "where PPO's clip acts: above it with a positive advantage or below it with a negative one",
        "basic",
    ),
    ("outside_low", "region_low", "whose ratio lies below the clip", "full"),
    ("outside_high", "region_high", "whose ratio lies above the clip", "full"),
    ("cut_low", "sign_aware_low", "below the clip with a negative advantage", "full"),
    ("cut_high", "sign_aware_high", "above the clip with a positive advantage", "full"),
    ("cut_dual", "dual", "above the dual bound with a negative advantage", "full"),
)
"""Region of `Clip`, name, tokens, level."""

PAIRS: tuple[tuple[PolicyName, PolicyName], ...] = (
    ("old", "policy"),
    ("policy", "old"),
    ("policy", "ref"),
    ("sampler", "policy"),
    ("policy", "sampler"),
    ("sampler", "old"),
    ("old", "sampler"),
)
"""(first, second) of every estimated KL(first || second)."""

_BASIC_KL = {
    ("k1", "old", "policy"),
    ("k3", "old", "policy"),
    ("k3", "policy", "ref"),
    ("k3", "policy", "sampler"),
    ("k3", "sampler", "old"),
}


@functools.lru_cache(maxsize=16)  # every row of every step asks for those of one loss
def declared(clipping_terms: tuple[str, ...] = ("policy",), clip: ClipRule | None = None) -> tuple[AnyMetric, ...]:
    """Return the canonical metrics of a loss, some of whose terms report the tokens they clip.

    ``clip`` is its clip, if a surrogate of whole documents needs document metrics for it; None: of tokens.
    """
    clips = _clips(clipping_terms, clip)
    return (*_counts(), *_logprobs(), *_supports(), *_ratios(), *clips, *_kls(), *_advantages(), *_weights())


def _document_mean(key: str, meaning: str, unit: str, column: Column) -> Metric:
    return Metric(key, f"mean over documents of the {meaning}", unit, column, Mean(), "document", "full")


def _statistics(name: str, label: str, column: Column, levels: Mapping[str, Level]) -> Iterable[Metric]:
    for reduce, level in levels.items():
        description, reducer = STATISTICS[reduce]
        unit = "tokens" if reduce == "effective_samples" else "1"
        yield Metric(f"{name}/{reduce}", f"{description} {label}", unit, column, reducer, level=level)


def _counts() -> Iterable[AnyMetric]:
    yield Metric("tokens/trained/sum", "tokens that count", "tokens", One(), Sum())
    nonfinite = "trained tokens at which some policy's log-probability is not finite"
    left_out = f"{nonfinite}; comparisons with that policy leave them out"
    yield Metric("tokens/nonfinite/sum", left_out, "tokens", NonFinite(), Sum())
    documents = "documents with at least one token that counts"
    yield Metric("documents/trained/sum", documents, "documents", One(), Count(), "document")
    runs = "unbroken runs of tokens that count (turns of a conversation)"
    yield Metric("segments/trained/sum", runs, "segments", One(), Count(), "segment")


def _logprobs() -> Iterable[AnyMetric]:
    for name in POLICY_NAMES:
        level: Level = "basic" if name in ("policy", "old") else "full"
        mean = f"mean log-probability under the {name} policy"
        yield Metric(f"logprob/{name}/mean", mean, "nats", LogProb(name), Mean(), level=level)
        yield _document_mean(f"logprob/{name}/document_mean", f"document's {mean}", "nats", LogProb(name))
    exact = "mean exact entropy of the policy over the whole vocabulary"
    yield Metric("entropy/policy/mean", exact, "nats", Entropy(), Mean())
    yield _document_mean("entropy/policy/document_mean", "document's mean entropy", "nats", Entropy())
    yield Metric("entropy/policy/min", "smallest entropy", "nats", Entropy(), Minimum(), level="full")
    yield Metric("entropy/policy/max", "largest entropy", "nats", Entropy(), Maximum(), level="full")


def _supports() -> Iterable[AnyMetric]:
    mass = "the policy's probability of the truncated support that was recorded for a token"
    for reduce in ("mean", "min"):
        description, reducer = STATISTICS[reduce]
        yield Metric(f"support/mass/{reduce}", f"{description} {mass}", "1", Support("mass"), reducer)
    size = "mean number of tokens in the truncated support; the vocabulary where there is none"
    yield Metric("support/size/mean", size, "tokens", Support("size"), Mean())
    outside = "share of tokens outside the support that the sampler's settings give for the policy's own distribution"
    yield Metric("support/outside/fraction", outside, "1", Support("outside"), Mean(), level="full")


def _ratios() -> Iterable[AnyMetric]:
    pairs: tuple[tuple[PolicyName, PolicyName], ...] = (("policy", "old"), ("old", "sampler"), ("policy", "sampler"))
    for above, below in pairs:
        ratio, name = Ratio(above, below), f"ratio/{above}_{below}"
        label = f"the token ratios {above} / {below}"
        level: Level = "basic" if (above, below) == ("policy", "old") else "full"
        yield from _statistics(name, label, ratio, dict.fromkeys(STATISTICS, level))
        yield _document_mean(f"{name}/document_mean", f"document's mean of {label}", "1", ratio)
        yield Metric(f"{name}/p99", f"99th percentile of {label}, within 1 %", "1", ratio, Quantile(0.99), level="full")
        log_mean = f"log of the mean of {label}, where the mean itself may overflow"
        yield Metric(f"{name}/log_mean", log_mean, "nats", LogRatio(above, below), LogMeanExp(), level="full")
        for reduce in ("mean", "std", "min", "max", "effective_samples"):
            yield document_ratio(reduce, above, below)


def _clips(clipping_terms: Sequence[str], clip: ClipRule | None) -> Iterable[AnyMetric]:
    for name in clipping_terms:
        meaning = f"share of tokens whose gradient the clip of the term {name!r} cut off"
        yield Metric(f"clip/{name}/fraction", meaning, "1", Cut(name), Mean())
    anchor = "old" if clip is None else clip.anchor
    for region, name, tokens, level in CLIP_REGIONS:
        key, meaning = f"clip/{name}/fraction", f"share of tokens {tokens}"
        if clip is None or not clip.of_documents:
            yield Metric(key, meaning, "1", Clip(region, anchor), Mean(), level=level)
        elif region != "cut_dual" or clip.dual is not None:
            yield document_clip(region, key, meaning, clip, level)
    outside = "share of the document's tokens whose ratio lies outside the clip"
    yield _document_mean("clip/region/document_mean", outside, "1", Clip("outside", anchor))
    zero = "share of tokens that get no gradient from the policy term: clipped, advantage 0, or correction weight 0"
    yield Metric("clip/gradient_zero/fraction", zero, "1", NoGradient(), Mean())


def _kls() -> Iterable[AnyMetric]:
    for (first, second), estimator in itertools.product(PAIRS, get_args(Estimator)):
        yield Metric(
            f"kl/{first}_{second}/{estimator}_mean",
            f"mean {estimator} estimate of KL({first} || {second}), as if {first} had sampled the tokens",
            "nats",
            KL(estimator, first, second),
            Mean(),
            level="basic" if (estimator, first, second) in _BASIC_KL else "full",
        )
    mean = "document's mean k3 estimate of KL(old || policy)"
    yield _document_mean("kl/old_policy/k3_document_mean", mean, "nats", KL("k3", "old", "policy"))


def _advantages() -> Iterable[AnyMetric]:
    yield Metric("advantage/all/mean", "mean advantage", "reward", Advantage(), Mean())
    yield Metric("advantage/all/min", "smallest advantage", "reward", Advantage(), Minimum())
    yield Metric("advantage/all/max", "largest advantage", "reward", Advantage(), Maximum())
    deviation = "standard deviation of the advantages"
    yield Metric("advantage/all/std", deviation, "reward", Advantage(), Deviation(), level="full")
    yield _document_mean("advantage/all/document_mean", "document's mean advantage", "reward", Advantage())
    zero = "share of tokens whose advantage is exactly 0"
    yield Metric("advantage/zero/fraction", zero, "1", Advantage(is_zero=True), Mean(), level="full")


def _weights() -> Iterable[AnyMetric]:
    weights: tuple[tuple[str, str, Level], ...] = (
        ("raw", "the correction weights before truncation and rejection", "basic"),
        ("applied", "the correction weights as applied, 0 where rejected", "full"),
    )
    levels: dict[str, Level]
    for name, label, highest in weights:
        levels = {"mean": "basic", "max": highest, "min": "full", "std": "full", "effective_samples": "basic"}
        yield from _statistics(f"weight/{name}", label, Extra(f"{name}_weight"), levels)
    kept, dropped = "share of tokens that the sampler correction kept", "tokens that the sampler correction rejected"
    yield Metric("weight/kept/fraction", kept, "1", Extra("kept"), Mean())
    kept = "share of the document's tokens that were kept"
    yield _document_mean("weight/kept/document_mean", kept, "1", Extra("kept"))
    yield Metric("weight/dropped/sum", dropped, "tokens", Dropped(), Sum(), level="full")
    changed = "share of tokens that the sampler correction kept at another weight"
    yield Metric("weight/truncated/fraction", changed, "1", Truncated(), Mean())
