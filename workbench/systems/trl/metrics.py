"""Metrics of TRL, by its definitions. See `workbench.systems.metrics`.

TRL averages quantities with one value per row (a ratio of documents, the weight of VESPO) over all rows, also those in
which nothing counts, whose ratio is 1; but over tokens as soon as a per-token advantage enters.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.metrics.definitions import Weight, statistic
from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import (
    KL,
    Advantage,
    Clip,
    ClipRule,
    Column,
    Entropy,
    Extra,
    LogRatio,
    Ratio,
    Region,
    TermValue,
)
from workbench.metrics.values import Maximum, Mean, Minimum
from workbench.systems.metrics import (
    Alias,
    Derived,
    PeerSettings,
    document_metric,
    in_region,
    outside_clip_of,
    per_document,
    token_metric,
)

SHARES: tuple[tuple[str, Region, str, str], ...] = (
    ("low_mean", "cut_low", "below the clip with a negative advantage", "sign_aware_low"),
    ("high_mean", "cut_high", "above the clip with a positive advantage", "sign_aware_high"),
    ("region_mean", "cut", "either of both", "sign_aware"),
)
"""(name, region of the clip, its description, canonical name) of clip_ratio keys, which use the advantage's sign."""

MEAN = Mean(least=1.0)
"""A mean over tokens; 0 over none."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield every metric of TRL with its definition, for a loss."""
    yield token_metric("entropy", "mean entropy", "nats", Entropy(), MEAN, canonical="entropy/policy/mean")
    if s.spec is not None and s.spec.kl.coefficient and s.spec.kl.importance != "none":
        meaning = "mean of k3 of KL(policy || ref) times the importance ratio"
        note = "without use_bias_correction_kl there is no ratio in it"
        yield token_metric("kl", meaning, "nats", TermValue("kl"), MEAN, note=note)
    else:
        meaning, same = "mean k3 estimate of KL(policy || ref)", "kl/policy_ref/k3_mean"
        yield token_metric("kl", meaning, "nats", KL("k3", "policy", "ref"), MEAN, canonical=same)
    if s.clip is not None and s.kind == "cispo":
        where = "above the upper bound with a positive advantage"
        yield _share("cispo_clip_ratio", "cut_high", where, s, s.clip, "sign_aware_high")
    elif s.clip is not None and s.kind in ("ppo", "gspo", "luspo"):
        clip = _within_delta(s, s.clip)
        for name, region, where, canonical in SHARES:
            yield _share(f"clip_ratio/{name}", region, where, s, clip, canonical)
        for name, region, reduce in (("low_min", "cut_low", "min"), ("high_max", "cut_high", "max")):
            yield _row_extreme(f"clip_ratio/{name}", region, s, clip, reduce)
    elif s.kind == "vespo":
        yield _gamma_weight(s)
    yield from _sampling(s)


def _sampling(s: PeerSettings) -> Iterable[Alias]:
    name, gap = "sampling/sampling_logp_difference", LogRatio("old", "sampler", absolute=True)
    yield token_metric(f"{name}/mean", "mean |old - sampler|", "nats", gap, canonical="kl/sampler_old/abs_mean")
    yield token_metric(f"{name}/max", "largest |old - sampler|", "nats", gap, Maximum())
    for reduce, reducer, which in (
        ("min", Minimum(), "smallest"),
        ("mean", Mean(), "mean"),
        ("max", Maximum(), "largest"),
    ):
        weight: Weight = "document" if s.of_documents and reduce == "mean" else "token"
        yield token_metric(
            f"sampling/importance_sampling_ratio/{reduce}",
            f"{which} of the correction weights as applied",
            "1",
            Extra("applied_weight"),
            reducer,
            weight,
            canonical=None if weight == "document" else f"weight/applied/{reduce}",
            note="after truncation; one weight per sequence where the ratio is one of a sequence",
        )


def _within_delta(s: PeerSettings, clip: ClipRule) -> ClipRule:
    """Return the clip that TRL tests, after delta has bounded the ratio: a bound beyond delta is none."""
    delta = None if s.spec is None else s.spec.surrogate.get("delta")
    if delta is None:
        return clip
    lower, upper = math.inf if delta < clip.lower else clip.lower, math.inf if delta <= clip.upper else clip.upper
    return clip._replace(lower=lower, upper=upper)


def _share(key: str, region: Region, where: str, s: PeerSettings, clip: ClipRule, canonical: str) -> Alias:
    if s.of_documents and not s.token_advantages:
        make = functools.partial(outside_clip_of, region, clip)
        return per_document(key, f"share of rows whose ratio is {where}", make, "mean", s.num_documents)
    if s.of_documents:
        return token_metric(key, f"share of tokens whose row's ratio is {where}", "1", _RowClip(region, clip), MEAN)
    if clip is not s.clip:
        return token_metric(key, f"share of tokens {where}, after delta", "1", _token_clip(region, clip), MEAN)
    column, same = Clip(region, clip.anchor), f"clip/{canonical}/fraction"
    return token_metric(key, f"share of tokens {where}", "1", column, MEAN, canonical=same)


def _row_extreme(key: str, region: Region, s: PeerSettings, clip: ClipRule, reduce: str) -> Alias:
    extreme = "smallest" if reduce == "min" else "largest"
    if s.of_documents and not s.token_advantages:
        meaning = f"{extreme} over rows of 1 if the row's ratio is clipped; 0 for a row in which nothing counts"
        read = functools.partial(_extreme_flag, reduce, region, clip, s.num_documents)
        return document_metric(key, meaning, "1", (LogRatio("policy", clip.anchor), Advantage()), read)
    column = _RowClip(region, clip) if s.of_documents else _token_clip(region, clip)
    meaning = f"{extreme} share, over rows with trained tokens, of a row's tokens that are clipped"
    return document_metric(key, meaning, "1", (column,), functools.partial(_extreme_share, reduce))


def _extreme_flag(
    reduce: str, region: Region, clip: ClipRule, number: int | None, tokens_N: Tensor, *sums_N: Tensor
) -> float:
    flags_N = outside_clip_of(region, clip, tokens_N, *sums_N)
    missing = 0 if number is None else number - len(tokens_N)
    return statistic(reduce, torch.cat([flags_N, flags_N.new_zeros(missing)]))


def _extreme_share(reduce: str, tokens_N: Tensor, clipped_N: Tensor) -> float:
    return statistic(reduce, clipped_N / tokens_N) if len(tokens_N) else math.nan


def _gamma_weight(s: PeerSettings) -> Alias:
    key, phi = "vespo/phi_seq_mean", Extra("sequence_weight")
    if s.token_advantages:
        return token_metric(key, "mean over tokens of the gamma weight", "1", phi, MEAN)
    meaning = "mean over rows of the gamma weight; 1 of a row in which nothing counts"
    return document_metric(key, meaning, "1", (phi,), functools.partial(_mean_with_ones, s.num_documents))


def _mean_with_ones(number: int | None, tokens_N: Tensor, sum_N: Tensor) -> float:
    """Return the mean over documents of the document's mean; missing documents count as 1."""
    missing = 0 if number is None else number - len(tokens_N)
    total = float((sum_N / tokens_N).sum()) + missing
    return total / (len(tokens_N) + missing) if len(tokens_N) + missing else math.nan


def _token_clip(region: Region, clip: ClipRule) -> Derived:
    """Return 1 where the token's ratio lies in a region of a clip that need not be the loss's own."""
    columns = Ratio("policy", clip.anchor), Advantage()
    return Derived(lambda ratio_T, advantages_T: in_region(region, ratio_T, advantages_T, clip), columns)


@dataclass(frozen=True)
class _RowClip(Column):
    """1 where the ratio of the token's document lies in a region of the clip, by the token's own advantage."""

    region: Region
    clip: ClipRule

    @property
    def needs(self) -> tuple[str, ...]:
        return "policy", self.clip.anchor

    def of(self, q: Quantities) -> Tensor | None:
        log_T = q.log_ratio("policy", self.clip.anchor)
        if log_T is None:
            return None
        return in_region(self.region, q.inputs.document_mean(log_T).exp(), q.advantages_T, self.clip)
