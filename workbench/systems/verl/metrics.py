"""Metrics of verl, by its definitions. See `workbench.systems.metrics`; `correction_metrics` has the rest of them.

Every mean adds 1e-8 to the tokens that it divides by. ``actor/pg_clipfrac`` has another definition for each loss.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.metrics.definitions import AnyMetric, DocumentMetric, Metric
from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import KL, Clip, ClipRule, Column, Cut, Entropy, Extra, LogRatio, PolicyName, Ratio
from workbench.metrics.values import Mean
from workbench.systems.metrics import (
    Alias,
    Derived,
    PeerSettings,
    document_metric,
    has_sign,
    negation,
    outside,
    ratio_of,
    token_metric,
)
from workbench.systems.verl import correction_metrics as rollout_correction
from workbench.systems.verl.correction import EPSILON

BOUNDED = ("ppo", "cispo", "sapo", "dppo_tv", "dppo_kl")
"""Kinds of surrogate whose log ratio verl clamps to +-20 before it reports its mean."""
SILENT = ("gpg", "sft", "dpo")
"""Kinds of surrogate that verl reports nothing about."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Return every metric of verl with its definition, for a loss."""
    return (alias for alias in _all(s) if not s.only or alias.metric.key.startswith(s.only))


def _all(s: PeerSettings) -> Iterable[Alias]:
    gated = s.spec is not None and s.spec.correction.denominator == "gated"
    for alias in (*_ratio(s), *_clip(s)):
        yield replace(alias, metric=_among_passed(alias.metric)) if gated else alias
    yield _mean("actor/entropy", "mean entropy (token-mean)", Entropy(), "nats", _near("entropy/policy/mean"))
    yield _mean(
        "actor/kl_loss",
        "mean k3 estimate of KL(policy || ref), log ratio within +-20, estimate within +-10 (low_var_kl, token-mean)",
        KL("k3", "policy", "ref", 20.0, 10.0),
        "nats",
        f"{_near('kl/policy_ref/k3_mean')}, unless a clamp binds",
    )
    yield from rollout_correction.mismatch(s)
    yield from rollout_correction.weights(s)
    yield from rollout_correction.gates(s)


def _ratio(s: PeerSettings) -> Iterable[Alias]:
    anchor, key = _anchor(s), "actor/ppo_kl"
    near = _near("kl/old_policy/k1_mean")
    if s.kind == "kl_cov":
        column: Column = LogRatio("policy", anchor, absolute=True)
        yield _mean(key, "mean |policy - old|", column, "nats", "not an estimate of a KL")
    elif s.kind in BOUNDED:
        note, column = f"{near}, unless a token's log ratio is beyond 20", KL("k1", anchor, "policy", input_limit=20.0)
        yield _mean(key, "mean of old - policy, each within +-20", column, "nats", note)
    elif s.kind not in SILENT:
        note = near if anchor == "old" else "of the sampler, against the policy"
        yield _mean(key, "mean of old - policy", KL("k1", anchor, "policy"), "nats", note)


def _clip(s: PeerSettings) -> Iterable[Alias]:
    """Yield shares of tokens, by the loss's own definition of clipped."""
    upper, lower = "actor/pg_clipfrac", "actor/pg_clipfrac_lower"
    clip = s.clip
    if s.kind == "ppo" and clip is not None:
        meaning, note = "share of tokens where the clip acts, by the sign of the advantage", "clip/sign_aware/fraction"
        yield _mean(upper, meaning, Clip("cut", clip.anchor), note=_near(note))
        meaning = "share of tokens above the dual bound with a negative advantage"
        yield _mean(lower, meaning, Clip("cut_dual", clip.anchor), note=_near("clip/dual/fraction"))
    elif s.kind in ("gspo", "gspo_token") and clip is not None:
        yield document_metric(
            upper,
            "share of tokens where the clip acts, by the document's ratio and the sign of the token's advantage",
            "1",
            (LogRatio("policy", clip.anchor), has_sign(1), has_sign(-1)),
            functools.partial(_share_cut, clip),
            by_length=True,
        )
        yield _mean(lower, "0", _Zero(), note="this loss has no second bound there")
    elif s.kind == "cispo" and clip is not None:
        note = _near("clip/region/fraction")
        yield _mean(upper, "share of tokens outside the clip", Clip("outside", clip.anchor), note=note)
        yield _mean(lower, "0", _Zero(), note="this loss has no second bound there")
    elif s.kind == "sapo":
        for name in (upper, lower):
            yield _mean(name, "0", _Zero(), note="this loss has no clip")
    elif s.kind == "gmpo" and clip is not None:
        for name, sign, adjective in ((upper, 1, "positive"), (lower, -1, "negative")):
            meaning = f"share of tokens outside the clip, on either side, with a {adjective} advantage"
            yield _mean(name, meaning, _product(Clip("outside", clip.anchor), has_sign(sign)))
    elif s.kind in ("dppo_tv", "dppo_kl"):
        cap = None if s.spec is None else s.spec.surrogate.get("ratio_cap")
        yield _mean(upper, "share of tokens outside the trust region", Cut("policy"))
        if cap is not None:
            column = _product(negation(Cut("policy")), outside(Ratio("policy", _anchor(s)), high=cap))
            yield _mean(lower, f"share of tokens inside the trust region with a ratio above {cap:g}", column)
    elif s.kind == "clip_cov":
        yield _mean(upper, "share of tokens selected by their covariance", Extra("selected"))


def _anchor(s: PeerSettings) -> PolicyName:
    """Return the policy in the denominator of the ratio; without a ratio, the sampler."""
    if s.spec is None:
        return "old"
    return "sampler" if s.kind == "reinforce" else s.spec.surrogate.ratio_anchor


def _near(canonical: str) -> str:
    return f"{canonical} up to the 1e-8"


def _mean(key: str, meaning: str, column: Column, unit: str = "1", note: str = "") -> Alias:
    return token_metric(key, meaning, unit, column, Mean(EPSILON), note=note)


def _among_passed(metric: AnyMetric) -> AnyMetric:
    """Return the same mean over tokens that pass a correction's gates."""
    if not isinstance(metric, Metric):
        return metric
    passed = Extra("passed")
    return DocumentMetric(
        metric.key,
        f"{metric.meaning}; of tokens that pass the gates",
        metric.unit,
        (_product(metric.column, passed), passed),
        _mean_of_passed,
        weight="its tokens that pass",
    )


def _mean_of_passed(_: Tensor, sum_N: Tensor, passed_N: Tensor) -> float:
    return float(sum_N.sum() / (passed_N.sum() + EPSILON))


def _share_cut(clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, rising_N: Tensor, falling_N: Tensor) -> float:
    ratio_N = ratio_of(tokens_N, log_ratio_N)
    cut_N = torch.where(ratio_N > clip.upper, rising_N, 0.0) + torch.where(ratio_N < clip.lower, falling_N, 0.0)
    return float(cut_N.sum() / (tokens_N.sum() + EPSILON))


def _product(first: Column, second: Column) -> Derived:
    return Derived(torch.mul, (first, second))


@dataclass(frozen=True)
class _Zero(Column):
    """0 on every token."""

    def of(self, q: Quantities) -> Tensor:
        return torch.zeros_like(q.one_T)
