"""Metrics of verl, by its definitions. See the package docstring; `correction_metrics` has the rest of them.

Every mean adds 1e-8 to the tokens that it divides by. ``actor/pg_clipfrac`` has another definition for each loss.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.metrics.definitions import AnyMetric, DocumentMetric, Metric
from workbench.metrics.quantities import (
    KL,
    Clip,
    ClipRule,
    Column,
    Cut,
    Entropy,
    Extra,
    LogRatio,
    PolicyName,
    Quantities,
)
from workbench.metrics.values import Mean
from workbench.systems.alias import Alias, PeerSettings
from workbench.systems.document_metrics import ratio_of
from workbench.systems.verl import correction_metrics as rollout_correction

EPSILON = 1e-8
"""Added to the tokens under a mean."""
BOUNDED = ("ppo", "cispo", "sapo", "dppo_tv", "dppo_kl")
"""Kinds of surrogate whose log ratio verl clamps to +-20 before it reports its mean."""
SILENT = ("gpg", "sft", "dpo")
"""Kinds of surrogate that verl reports nothing about."""

LEFT_OUT: Mapping[str, str] = {}
"""Name -> what the system reports there in some case, and what is reported here instead."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Return every metric of verl with its definition, for a loss."""
    return (alias for alias in _all(s) if not s.only or alias.metric.key.startswith(s.only))


def _all(s: PeerSettings) -> Iterable[Alias]:
    gated = s.spec is not None and s.spec.correction.denominator == "gated"
    for alias in (*_ratio(s), *_clip(s)):
        yield replace(alias, metric=_among_passed(alias.metric)) if gated else alias
    yield Alias(
        _mean("actor/entropy", "mean entropy (token-mean)", Entropy(), "nats"), None, _near("entropy/policy/mean")
    )
    yield Alias(
        _mean(
            "actor/kl_loss",
            "mean k3 estimate of KL(policy || ref), log ratio within +-20, estimate within "
            "+-10 (low_var_kl, token-mean)",
            KL("k3", "policy", "ref", 20.0, 10.0),
            "nats",
        ),
        None,
        f"{_near('kl/policy_ref/k3_mean')}, unless a clamp binds",
    )
    yield from rollout_correction.mismatch(s)
    yield from rollout_correction.weights(s)
    yield from rollout_correction.gates(s)


def _ratio(s: PeerSettings) -> Iterable[Alias]:
    anchor = _anchor(s)
    if s.kind == "kl_cov":
        yield Alias(
            _mean("actor/ppo_kl", "mean |policy - old|", LogRatio("policy", anchor, absolute=True), "nats"),
            None,
            "not an estimate of a KL",
        )
    elif s.kind in BOUNDED:
        yield Alias(
            _mean(
                "actor/ppo_kl",
                "mean of old - policy, each within +-20",
                KL("k1", anchor, "policy", input_limit=20.0),
                "nats",
            ),
            None,
            f"{_near('kl/old_policy/k1_mean')}, unless a token's log ratio is beyond 20",
        )
    elif s.kind not in SILENT:
        yield Alias(
            _mean("actor/ppo_kl", "mean of old - policy", KL("k1", anchor, "policy"), "nats"),
            None,
            _near("kl/old_policy/k1_mean") if anchor == "old" else "of the sampler, against the policy",
        )


def _clip(s: PeerSettings) -> Iterable[Alias]:
    """Yield shares of tokens, by the loss's own definition of clipped."""
    upper, lower = "actor/pg_clipfrac", "actor/pg_clipfrac_lower"
    clip = s.clip
    if s.kind == "ppo" and clip is not None:
        yield Alias(
            _mean(upper, "share of tokens where the clip acts, by the sign of the advantage", Clip("cut", clip.anchor)),
            None,
            _near("clip/sign_aware/fraction"),
        )
        yield Alias(
            _mean(
                lower, "share of tokens above the dual bound with a negative advantage", Clip("cut_dual", clip.anchor)
            ),
            None,
            _near("clip/dual/fraction"),
        )
    elif s.kind in ("gspo", "gspo_token") and clip is not None:
        yield Alias(
            DocumentMetric(
                upper,
                "share of tokens where the clip acts, by the document's ratio and the sign of the token's advantage",
                "1",
                (LogRatio("policy", clip.anchor), _Sign(1), _Sign(-1)),
                functools.partial(_share_cut, clip),
                weight="its trained tokens",
            )
        )
        yield Alias(_mean(lower, "0", _Zero()), None, "this loss has no second bound there")
    elif s.kind == "cispo" and clip is not None:
        yield Alias(
            _mean(upper, "share of tokens outside the clip", Clip("outside", clip.anchor)),
            None,
            _near("clip/region/fraction"),
        )
        yield Alias(_mean(lower, "0", _Zero()), None, "this loss has no second bound there")
    elif s.kind == "sapo":
        for name in (upper, lower):
            yield Alias(_mean(name, "0", _Zero()), None, "this loss has no clip")
    elif s.kind == "gmpo" and clip is not None:
        for name, sign, adjective in ((upper, 1, "positive"), (lower, -1, "negative")):
            yield Alias(
                _mean(
                    name,
                    f"share of tokens outside the clip, on either side, with a {adjective} advantage",
                    _Product(Clip("outside", clip.anchor), _Sign(sign)),
                )
            )
    elif s.kind in ("dppo_tv", "dppo_kl"):
        cap = None if s.spec is None else s.spec.surrogate.get("ratio_cap")
        yield Alias(_mean(upper, "share of tokens outside the trust region", Cut("policy")))
        if cap is not None:
            yield Alias(
                _mean(
                    lower,
                    f"share of tokens inside the trust region with a ratio above {cap:g}",
                    _Product(_Kept("policy"), _Above(_anchor(s), cap)),
                )
            )
    elif s.kind == "clip_cov":
        yield Alias(_mean(upper, "share of tokens selected by their covariance", Extra("selected")))


def _anchor(s: PeerSettings) -> PolicyName:
    """Return the policy in the denominator of the ratio; without a ratio, the sampler."""
    if s.spec is None:
        return "old"
    return "sampler" if s.kind == "reinforce" else s.spec.surrogate.ratio_anchor


def _near(canonical: str) -> str:
    return f"{canonical} up to the 1e-8"


def _mean(key: str, meaning: str, column: Column, unit: str = "1") -> Metric:
    return Metric(key, meaning, unit, column, Mean(EPSILON))


def _among_passed(metric: AnyMetric) -> AnyMetric:
    """Return the same mean over tokens that pass a correction's gates."""
    if not isinstance(metric, Metric):
        return metric
    passed = Extra("passed")
    return DocumentMetric(
        metric.key,
        f"{metric.meaning}; of tokens that pass the gates",
        metric.unit,
        (_Product(metric.column, passed), passed),
        _mean_of_passed,
        weight="its tokens that pass",
    )


def _mean_of_passed(_: Tensor, sum_N: Tensor, passed_N: Tensor) -> float:
    return float(sum_N.sum() / (passed_N.sum() + EPSILON))


def _share_cut(clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, rising_N: Tensor, falling_N: Tensor) -> float:
    ratio_N = ratio_of(tokens_N, log_ratio_N)
    cut_N = torch.where(ratio_N > clip.upper, rising_N, 0.0) + torch.where(ratio_N < clip.lower, falling_N, 0.0)
    return float(cut_N.sum() / (tokens_N.sum() + EPSILON))


@dataclass(frozen=True)
class _Zero(Column):
    """0 on every token."""

    def of(self, q: Quantities) -> Tensor:
        return torch.zeros_like(q.one_T)


@dataclass(frozen=True)
class _Sign(Column):
    """1 where the advantage has a sign, else 0."""

    sign: int

    def of(self, q: Quantities) -> Tensor:
        return (q.advantages_T * self.sign > 0).double()


@dataclass(frozen=True)
class _Product(Column):
    """One quantity times another."""

    first: Column
    second: Column

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.first.needs, *self.second.needs)

    def of(self, q: Quantities) -> Tensor | None:
        first_T, second_T = q.column(self.first), q.column(self.second)
        return None if first_T is None or second_T is None else first_T * second_T


@dataclass(frozen=True)
class _Kept(Column):
    """1 where a term's own clip did not cut its gradient."""

    term: str

    def of(self, q: Quantities) -> Tensor | None:
        cut_T = q.column(Cut(self.term))
        return None if cut_T is None else 1 - cut_T


@dataclass(frozen=True)
class _Above(Column):
    """1 where policy / anchor is above a number."""

    anchor: PolicyName
    limit: float

    @property
    def needs(self) -> tuple[str, ...]:
        return "policy", self.anchor

    def of(self, q: Quantities) -> Tensor | None:
        ratio_T = q.ratio("policy", self.anchor)
        return None if ratio_T is None else (ratio_T > self.limit).double()
