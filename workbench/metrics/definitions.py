"""Declarations of the metrics of a step: key, unit, population, weight and reducer, as data.

From these declarations metrics are computed (`workbench.metrics.policy`), listed (`metric_table`) and explained. Keys
are ``group/name/statistic``. The reducer is part of the declaration and is never derived from the key.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from workbench.metrics.quantities import (
    KL,
    Advantage,
    Clip,
    ClipRule,
    Column,
    Cut,
    Dropped,
    Entropy,
    Extra,
    LogProb,
    LogRatio,
    NoGradient,
    NonFinite,
    One,
    Ratio,
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

    @property
    def weight_description(self) -> str:
        """Description of the weight."""
        return WEIGHTS[self.weight]

    @property
    def reducer_description(self) -> str:
        """Description of the reducer."""
        return str(self.reducer)


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

    @property
    def needs(self) -> tuple[str, ...]:
        """The policies whose log-probabilities it needs."""
        return tuple(dict.fromkeys(name for column in (*self.columns, *self.extremes) for name in column.needs))

    @property
    def population(self) -> str:
        """Description of the documents."""
        return f"documents with {_population(self.needs)}"

    @property
    def weight_description(self) -> str:
        """Description of the weight."""
        return self.weight

    @property
    def reducer_description(self) -> str:
        """Description of the reducer."""
        return "from a table of documents"


AnyMetric = Metric | DocumentMetric


def _population(needs: Iterable[str]) -> str:
    named = " and ".join(needs)
    return f"trained tokens with finite {named} log-probability" if named else "trained tokens"


def metric_table(metrics: Sequence[AnyMetric] | None = None) -> pd.DataFrame:
    """Return every metric with its meaning, unit, population, weight, reducer and level; one row per key.

    Args:
        metrics: declarations; None: the canonical ones of a loss whose term "policy" clips.
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
                "weight": metric.weight_description,
                "reducer": metric.reducer_description,
                "level": metric.level,
            }
            for metric in metrics
        ]
    ).set_index("key")


def markdown_table(metrics: Sequence[AnyMetric] | None = None) -> str:
    """Return the same table in Markdown, for a README."""
    frame = metric_table(metrics).reset_index()
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


# ---- metrics of documents ------------------------------------------------------------------------------


def document_ratio(reduce: str, above: str = "policy", below: str = "old") -> DocumentMetric:
    """Declare a statistic of the documents' ratios, each exp of its mean log ratio (as GSPO defines it)."""
    meaning = {
        "mean": "mean of",
        "min": "smallest of",
        "max": "largest of",
        "std": "standard deviation of",
        "effective_samples": "effective sample size, in documents, of",
    }[reduce]
    unit = "documents" if reduce == "effective_samples" else "1"
    return DocumentMetric(
        f"ratio_document/{above}_{below}/{reduce}",
        f"{meaning} the documents' ratios {above} / {below}, each exp(mean log ratio of its trained tokens)",
        unit,
        (LogRatio(above, below),),
        functools.partial(_ratio_statistic, reduce),
    )


def _ratio_statistic(reduce: str, tokens_N: Tensor, log_ratio_N: Tensor) -> float:
    return statistic(reduce, (log_ratio_N / tokens_N).exp())


def statistic(reduce: str, values_N: Tensor) -> float:
    """Return an unweighted statistic of one number per document; NaN or the identity for no documents."""
    empty = not values_N.numel()
    if reduce == "sum":
        return float(values_N.sum())
    if reduce == "squared_sum":
        return float(values_N.square().sum())
    if reduce == "min":
        return float("inf") if empty else float(values_N.min())
    if reduce == "max":
        return float("-inf") if empty else float(values_N.max())
    if empty:
        return float("nan")
    if reduce == "std":
        return float(values_N.std(correction=0))
    if reduce == "effective_samples":
        return float(values_N.sum() ** 2 / values_N.square().sum())
    return float(values_N.mean())


def document_clip(region: str, key: str, meaning: str, clip: ClipRule, level: Level = "basic") -> DocumentMetric:
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


def _clipped_share(region: str, clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, advantage_N: Tensor) -> float:
    beyond_N = beyond(region, (log_ratio_N / tokens_N).exp(), advantage_N / tokens_N, clip)
    total = float(tokens_N.sum())
    if beyond_N is None or not total:
        return float("nan")
    return float(torch.where(beyond_N, tokens_N, 0.0).sum()) / total


# ---- the canonical set ---------------------------------------------------------------------------------

CLIP_REGIONS: tuple[tuple[str, str, str, Level], ...] = (
    (
        "outside",
        "clip/region/fraction",
        "share of tokens whose ratio lies outside the clip, for either sign of the advantage",
        "basic",
    ),
    (
        "cut",
        "clip/sign_aware/fraction",
        "share of tokens where PPO's clip acts: above it with a positive advantage or below it with a negative one",
        "basic",
    ),
    ("outside_low", "clip/region_low/fraction", "share of tokens whose ratio lies below the clip", "full"),
    ("outside_high", "clip/region_high/fraction", "share of tokens whose ratio lies above the clip", "full"),
    ("cut_low", "clip/sign_aware_low/fraction", "share of tokens below the clip with a negative advantage", "full"),
    ("cut_high", "clip/sign_aware_high/fraction", "share of tokens above the clip with a positive advantage", "full"),
    ("cut_dual", "clip/dual/fraction", "share of tokens above the dual bound with a negative advantage", "full"),
)

PAIRS: tuple[tuple[str, str], ...] = (
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


def declared(clipping_terms: Sequence[str] = ("policy",), clip: ClipRule | None = None) -> tuple[AnyMetric, ...]:
    """Return the canonical metrics of a loss.

    Args:
        clipping_terms: names of its terms that report the tokens they clip.
        clip: its clip, if a surrogate of whole documents needs document metrics for it; None: of tokens.
    """
    return tuple(
        itertools.chain(
            _counts(), _logprobs(), _ratios(), _clips(tuple(clipping_terms), clip), _kls(), _advantages(), _weights()
        )
    )


def _counts() -> Iterable[AnyMetric]:
    yield Metric("tokens/trained/sum", "tokens that count", "tokens", One(), Sum())
    yield Metric(
        "tokens/nonfinite/sum",
        "trained tokens at which some policy's log-probability is not finite; "
        "comparisons with that policy leave them out",
        "tokens",
        NonFinite(),
        Sum(),
    )
    yield Metric(
        "documents/trained/sum",
        "documents with at least one token that counts",
        "documents",
        One(),
        Count(),
        "document",
    )
    yield Metric(
        "segments/trained/sum",
        "unbroken runs of tokens that count (turns of a conversation)",
        "segments",
        One(),
        Count(),
        "segment",
    )


def _logprobs() -> Iterable[AnyMetric]:
    for name in ("policy", "old", "sampler", "ref"):
        level: Level = "basic" if name in ("policy", "old") else "full"
        yield Metric(
            f"logprob/{name}/mean",
            f"mean log-probability under the {name} policy",
            "nats",
            LogProb(name),
            Mean(),
            level=level,
        )
        yield Metric(
            f"logprob/{name}/document_mean",
            f"mean over documents of the document's mean log-probability under the {name} policy",
            "nats",
            LogProb(name),
            Mean(),
            "document",
            "full",
        )
    yield Metric(
        "entropy/policy/mean", "mean exact entropy of the policy over the whole vocabulary", "nats", Entropy(), Mean()
    )
    yield Metric(
        "entropy/policy/document_mean",
        "mean over documents of the document's mean entropy",
        "nats",
        Entropy(),
        Mean(),
        "document",
        "full",
    )
    yield Metric("entropy/policy/min", "smallest entropy", "nats", Entropy(), Minimum(), level="full")
    yield Metric("entropy/policy/max", "largest entropy", "nats", Entropy(), Maximum(), level="full")


def _ratios() -> Iterable[AnyMetric]:
    for above, below in (("policy", "old"), ("old", "sampler"), ("policy", "sampler")):
        ratio, name = Ratio(above, below), f"ratio/{above}_{below}"
        label = f"the token ratios {above} / {below}"
        main: Level = "basic" if (above, below) == ("policy", "old") else "full"
        yield Metric(f"{name}/mean", f"mean of {label}", "1", ratio, Mean(), level=main)
        yield Metric(f"{name}/std", f"standard deviation of {label}", "1", ratio, Deviation(1.0), level=main)
        yield Metric(f"{name}/min", f"smallest of {label}", "1", ratio, Minimum(), level=main)
        yield Metric(f"{name}/max", f"largest of {label}", "1", ratio, Maximum(), level=main)
        yield Metric(f"{name}/sum", f"sum of {label}", "1", ratio, Sum(), level=main)
        yield Metric(f"{name}/squared_sum", f"sum of squares of {label}", "1", ratio, SquaredSum(), level=main)
        yield Metric(
            f"{name}/effective_samples",
            f"effective sample size of {label}",
            "tokens",
            ratio,
            EffectiveSampleSize(),
            level=main,
        )
        yield Metric(
            f"{name}/document_mean",
            f"mean over documents of the document's mean of {label}",
            "1",
            ratio,
            Mean(),
            "document",
            "full",
        )
        yield Metric(f"{name}/p99", f"99th percentile of {label}, within 1 %", "1", ratio, Quantile(0.99), level="full")
        yield Metric(
            f"{name}/log_mean",
            f"log of the mean of {label}, where the mean itself may overflow",
            "nats",
            LogRatio(above, below),
            LogMeanExp(),
            level="full",
        )
        for reduce in ("mean", "std", "min", "max", "effective_samples"):
            yield document_ratio(reduce, above, below)


def _clips(clipping_terms: Sequence[str], clip: ClipRule | None) -> Iterable[AnyMetric]:
    for name in clipping_terms:
        yield Metric(
            f"clip/{name}/fraction",
            f"share of tokens whose gradient the clip of the term {name!r} cut off",
            "1",
            Cut(name),
            Mean(),
        )
    anchor = "old" if clip is None else clip.anchor
    for region, key, meaning, level in CLIP_REGIONS:
        if clip is None or not clip.of_documents:
            yield Metric(key, meaning, "1", Clip(region, anchor), Mean(), level=level)
        elif region != "cut_dual" or clip.dual is not None:
            yield document_clip(region, key, meaning, clip, level)
    yield Metric(
        "clip/region/document_mean",
        "mean over documents of the share of the document's tokens whose ratio lies outside the clip",
        "1",
        Clip("outside", anchor),
        Mean(),
        "document",
        "full",
    )
    yield Metric(
        "clip/gradient_zero/fraction",
        "share of tokens that get no gradient from the policy term: clipped, advantage 0, or correction weight 0",
        "1",
        NoGradient(),
        Mean(),
    )


def _kls() -> Iterable[AnyMetric]:
    for (first, second), estimator in itertools.product(PAIRS, ("k1", "k2", "k3", "abs")):
        level: Level = "basic" if (estimator, first, second) in _BASIC_KL else "full"
        yield Metric(
            f"kl/{first}_{second}/{estimator}_mean",
            f"mean {estimator} estimate of KL({first} || {second}), as if {first} had sampled the tokens",
            "nats",
            KL(estimator, first, second),
            Mean(),
            level=level,
        )
    yield Metric(
        "kl/old_policy/k3_document_mean",
        "mean over documents of the document's mean k3 estimate of KL(old || policy)",
        "nats",
        KL("k3", "old", "policy"),
        Mean(),
        "document",
        "full",
    )


def _advantages() -> Iterable[AnyMetric]:
    yield Metric("advantage/all/mean", "mean advantage", "reward", Advantage(), Mean())
    yield Metric("advantage/all/min", "smallest advantage", "reward", Advantage(), Minimum())
    yield Metric("advantage/all/max", "largest advantage", "reward", Advantage(), Maximum())
    yield Metric(
        "advantage/all/std", "standard deviation of the advantages", "reward", Advantage(), Deviation(), level="full"
    )
    yield Metric(
        "advantage/all/document_mean",
        "mean over documents of the document's mean advantage",
        "reward",
        Advantage(),
        Mean(),
        "document",
        "full",
    )
    yield Metric(
        "advantage/zero/fraction",
        "share of tokens whose advantage is exactly 0",
        "1",
        Advantage(is_zero=True),
        Mean(),
        level="full",
    )


def _weights() -> Iterable[AnyMetric]:
    raw, applied = Extra("raw_weight"), Extra("applied_weight")
    for name, column, label in (
        ("raw", raw, "correction weights before truncation and rejection"),
        ("applied", applied, "correction weights as applied, 0 where rejected"),
    ):
        yield Metric(f"weight/{name}/mean", f"mean of the {label}", "1", column, Mean())
        yield Metric(
            f"weight/{name}/max",
            f"largest of the {label}",
            "1",
            column,
            Maximum(),
            level="basic" if name == "raw" else "full",
        )
        yield Metric(f"weight/{name}/min", f"smallest of the {label}", "1", column, Minimum(), level="full")
        yield Metric(
            f"weight/{name}/std", f"standard deviation of the {label}", "1", column, Deviation(1.0), level="full"
        )
        yield Metric(
            f"weight/{name}/effective_samples",
            f"effective sample size of the {label}",
            "tokens",
            column,
            EffectiveSampleSize(),
        )
    yield Metric("weight/kept/fraction", "share of tokens that the sampler correction kept", "1", Extra("kept"), Mean())
    yield Metric(
        "weight/kept/document_mean",
        "mean over documents of the share of the document's tokens that were kept",
        "1",
        Extra("kept"),
        Mean(),
        "document",
        "full",
    )
    yield Metric(
        "weight/dropped/sum", "tokens that the sampler correction rejected", "tokens", Dropped(), Sum(), level="full"
    )
    yield Metric(
        "weight/truncated/fraction",
        "share of tokens that the sampler correction kept at another weight",
        "1",
        Truncated(),
        Mean(),
    )
