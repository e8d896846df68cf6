"""What Fast-LLM, TRL, verl and NeMo-RL report, under their names and by their definitions.

A name says little: `clip_ratio/region_mean` (TRL) looks at the sign of the advantage, `clipped_ratio_fraction`
(Fast-LLM) does not and is a mean over documents. So nothing here is a rename of a number that happens to be near: each
is a declaration of its own, computed by its own definition, and `Alias.canonical` names the workbench's key only
where both are the same number on every batch.

Read from the code and checked against numbers of Fast-LLM 7d61a1ba, TRL 1.16.0, verl 1dda039b, NeMo-RL 7ea279ab.
What these systems compute wrongly, or under a name that then means something else, is not imitated: see `LEFT_OUT`.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.spec import LossSpec
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.definitions import AnyMetric, DocumentMetric, Metric, Weight, metric_table, statistic
from workbench.metrics.policy import measure
from workbench.metrics.quantities import (
    KL,
    Advantage,
    Clip,
    ClipRule,
    Column,
    DocumentSlots,
    Dropped,
    Entropy,
    Extra,
    JensenShannon,
    LogProb,
    LogRatio,
    One,
    Quantities,
    Ratio,
    SampledEntropy,
    Truncated,
    beyond,
    clip_rule,
)
from workbench.metrics.values import (
    Count,
    Deviation,
    EffectiveSampleSize,
    Maximum,
    Mean,
    Minimum,
    Reducer,
    Share,
    SquaredSum,
    Sum,
    Value,
)

if TYPE_CHECKING:
    import pandas as pd

System = Literal["fast_llm", "trl", "verl", "nemo_rl"]


class PeerSettings(NamedTuple):
    """What the definitions of other systems depend on.

    Attributes:
        clip: the surrogate's clip; None: metrics of the clip are left out.
        kind: of surrogate, as `workbench.losses.spec` names it.
        num_documents: all documents of the step, also those in which nothing counts; what Fast-LLM, TRL's sequence
            metrics and NeMo divide by. None: those with trained tokens.
        kl_estimator: the estimator that the KL penalty uses; NeMo's error metrics take it too.
        of_documents: the surrogate's ratio, and a correction's weight, is one of a document.
    """

    clip: ClipRule | None
    kind: str = "ppo"
    num_documents: int | None = None
    kl_estimator: str = "k3"
    of_documents: bool = False


@dataclass(frozen=True)
class Alias:
    """One number of another system.

    Attributes:
        metric: its declaration; the key is the system's own name for it.
        canonical: the workbench's key of the same number; None: no canonical metric is the same on every batch.
        note: how it differs from what its name suggests.
    """

    metric: AnyMetric
    canonical: str | None = None
    note: str = ""


LEFT_OUT: Mapping[tuple[str, str], str] = {
    ("nemo_rl", "sampling_importance_ratio"): "with sequence ratios NeMo multiplies [B, 1] by [B] and reports about B "
    "times the mean weight; here it is the mean weight",
    ("nemo_rl", "probs_ratio"): "with disable_ppo_ratio NeMo puts a mean log-probability under this key; here it stays "
    "the ratio",
    ("nemo_rl", "sequence ratio"): "NeMo divides a sequence's log ratio by tokens + 1e-8; here by its tokens",
    ("verl", "actor/ppo_kl"): "with kl_cov verl puts mean |log ratio| under this key; here it stays mean(old - policy)",
    ("verl", "actor/pg_clipfrac"): "defined by another mask for each loss; here for ppo, gspo, gspo_token and cispo",
    ("verl", "rollout_corr/*"): "verl counts sequences without tokens as perplexity 1; here they do not count",
    ("trl", "kl"): "with use_bias_correction_kl TRL multiplies by the ratio first; here it never is",
    ("trl", "clip_ratio/*"): "TRL looks at the ratio after delta has bounded it; here before",
}
"""(system, name) -> what that system reports there in some case, and what is reported here instead."""


def as_named_by(system: System, inputs: LossInputs, loss_mask_T: Tensor, *, terms: Mapping[str, Term] | None = None,
                loss_spec: LossSpec | None = None, slots: DocumentSlots | None = None) -> dict[str, Value]:
    """One micro-batch's metrics as another system names and defines them, unfinished.

    They merge like all others: `workbench.metrics.values.finish_metrics`, alone or together with `policy_metrics`.
    Names whose quantities the batch does not have (no sampler, no reference, no clip) are left out.

    Args:
        system: "fast_llm", "trl", "verl" or "nemo_rl".
        inputs: what the loss saw.
        loss_mask_T: [T] bool, the population.
        terms: what the loss said; corrections keep their weights there.
        loss_spec: the loss's settings.
        slots: names of the row's documents in the whole step; needed by numbers of whole documents.

    Raises:
        SpecError: another system, or a sequence-level loss without ``slots``.
    """
    settings = settings_of(loss_spec, slots)
    if settings.of_documents and slots is None:
        raise SpecError(f"metrics as {system} names them, for a loss of kind {settings.kind!r}", found="no slots",
                        rule="a ratio of documents needs the names of the documents in the step",
                        fix="pass slots=DocumentSlots(first, number)")
    q = Quantities(inputs, terms or {}, loss_mask_T, clip=settings.clip, slots=slots)
    return measure((alias.metric for alias in aliases(system, settings)), q)


def settings_of(loss_spec: LossSpec | None, slots: DocumentSlots | None = None) -> PeerSettings:
    """What a loss's settings say about other systems' definitions."""
    clip = clip_rule(loss_spec)
    number = None if slots is None else slots.number
    if loss_spec is None:
        return PeerSettings(clip, num_documents=number)
    kind = loss_spec.surrogate.kind
    return PeerSettings(clip, kind, number, loss_spec.kl.estimator, clip is not None and clip.of_documents)


def aliases(system: System, settings: PeerSettings) -> tuple[Alias, ...]:
    """Every name of a system with its definition, for a loss.

    Raises:
        SpecError: another system.
    """
    if system not in SYSTEMS:
        raise SpecError(f"metrics as {system!r} names them", rule=f"one of {', '.join(SYSTEMS)}",
                        fix="choose one of them")
    return tuple(SYSTEMS[system](settings))


def alias_table(system: System, settings: PeerSettings | None = None) -> pd.DataFrame:
    """A system's names with definitions, and the canonical key where it is the same number. One row a name."""
    settings = settings or PeerSettings(ClipRule(0.8, 1.2, 3.0))
    chosen = aliases(system, settings)
    frame = metric_table([alias.metric for alias in chosen]).drop(columns="level")
    frame.insert(0, "canonical", [alias.canonical or "" for alias in chosen])
    frame["note"] = [alias.note for alias in chosen]
    return frame


# ---- Fast-LLM ------------------------------------------------------------------------------------------


def _fast_llm(s: PeerSettings) -> Iterable[Alias]:
    """Sums of document means over all documents of the step; sums of ratios are not divided."""
    over: Reducer = Mean() if s.num_documents is None else Share(s.num_documents)

    def mean(name: str, meaning: str, unit: str, column: Column, canonical: str | None = None) -> Alias:
        # With empty documents in the step the divisor is another one, so the canonical mean is another number.
        same = canonical if s.num_documents is None else None
        return Alias(Metric(name, f"sum over documents of the document's mean {meaning}, divided by the documents of "
                            "the step", unit, column, over, "document"), same,
                     "documents without trained tokens count in the divisor")

    yield mean("new_logprobs", "log-probability", "nats", LogProb("policy"), "logprob/policy/document_mean")
    yield mean("old_logprobs", "old log-probability", "nats", LogProb("old"), "logprob/old/document_mean")
    yield mean("advantage", "advantage", "reward", Advantage(), "advantage/all/document_mean")
    yield mean("entropy", "entropy", "nats", Entropy(), "entropy/policy/document_mean")
    yield Alias(Metric("max_advantage", "largest advantage", "reward", Advantage(), Maximum()), "advantage/all/max")
    yield Alias(Metric("min_advantage", "smallest advantage", "reward", Advantage(), Minimum()), "advantage/all/min")
    yield Alias(Metric("num_tokens", "tokens that count", "tokens", One(), Sum()), "tokens/trained/sum")
    ratio = Ratio("policy", "old")
    if not s.of_documents:
        yield mean("ratio_new_old", "ratio", "1", ratio, "ratio/policy_old/document_mean")
        yield mean("kl_new_old", "r - 1 - log r", "nats", KL("k3", "old", "policy"), "kl/old_policy/k3_document_mean")
        yield mean("clipped_ratio_fraction", "share of tokens outside the clip", "1", Clip("outside"),
                   "clip/region/document_mean")
        yield Alias(Metric("ratio_new_old_sum", "sum of ratios over tokens", "1", ratio, Sum()), "ratio/policy_old/sum")
        yield Alias(Metric("ratio_new_old_squared_sum", "sum of squared ratios over tokens", "1", ratio, SquaredSum()),
                    "ratio/policy_old/squared_sum")
        return
    for name, meaning, make in (
            ("ratio_new_old", "ratio", _ratio_of), ("kl_new_old", "r - 1 - log r", _k3_of),
            ("clipped_ratio_fraction", "share outside the clip", functools.partial(_beyond_of, "outside", s.clip))):
        yield Alias(_per_document(name, f"sum over documents of the {meaning} of the document's ratio, divided by the "
                                  "documents of the step", make, "mean", s.num_documents))
    for name, reduce in (("ratio_new_old_sum", "sum"), ("ratio_new_old_squared_sum", "squared_sum")):
        yield Alias(_per_document(name, f"{reduce.replace('_', ' ')} of the documents' ratios", _ratio_of, reduce))
    yield Alias(Metric("num_segments", "documents with tokens that count", "documents", One(), Count(), "document"),
                "documents/trained/sum", "a segment is a document there")


# ---- TRL -----------------------------------------------------------------------------------------------


def _trl(s: PeerSettings) -> Iterable[Alias]:
    yield Alias(Metric("entropy", "mean entropy", "nats", Entropy(), Mean()), "entropy/policy/mean")
    yield Alias(Metric("kl", "mean k3 estimate of KL(policy || ref)", "nats", KL("k3", "policy", "ref"), Mean()),
                "kl/policy_ref/k3_mean")
    # The clip_ratio keys look at the sign of the advantage, "region" means low or high.
    shares = (("low_mean", "cut_low", "below the clip with a negative advantage", "sign_aware_low"),
              ("high_mean", "cut_high", "above the clip with a positive advantage", "sign_aware_high"),
              ("region_mean", "cut", "either of both", "sign_aware"))
    if s.kind == "cispo" and s.clip is not None:
        yield Alias(Metric("cispo_clip_ratio", "share of tokens above the upper bound with a positive advantage", "1",
                           Clip("cut_high", s.clip.anchor), Mean()), "clip/sign_aware_high/fraction")
    elif s.clip is not None and s.kind in ("ppo", "gspo", "luspo"):
        for name, region, words, canonical in shares:
            if s.of_documents:
                yield Alias(_per_document(f"clip_ratio/{name}", f"share of rows whose ratio is {words}",
                                          functools.partial(_beyond_of, region, s.clip), "mean", s.num_documents))
            else:
                yield Alias(Metric(f"clip_ratio/{name}", f"share of tokens {words}", "1",
                                   Clip(region, s.clip.anchor), Mean()), f"clip/{canonical}/fraction")
        for name, region, reduce in (("low_min", "cut_low", "min"), ("high_max", "cut_high", "max")):
            yield Alias(_row_extreme(f"clip_ratio/{name}", region, s, reduce))
    gap = LogRatio("old", "sampler", absolute=True)
    yield Alias(Metric("sampling/sampling_logp_difference/mean", "mean |old - sampler|", "nats", gap, Mean()),
                "kl/sampler_old/abs_mean")
    yield Alias(Metric("sampling/sampling_logp_difference/max", "largest |old - sampler|", "nats", gap, Maximum()))
    for reduce, reducer, words in (("min", Minimum(), "smallest"), ("mean", Mean(), "mean"),
                                   ("max", Maximum(), "largest")):
        weight: Weight = "document" if s.of_documents and reduce == "mean" else "token"
        yield Alias(Metric(f"sampling/importance_sampling_ratio/{reduce}", f"{words} of the correction weights as "
                           "applied", "1", Extra("applied_weight"), reducer, weight),
                    None if weight == "document" else f"weight/applied/{reduce}",
                    "after truncation; one weight a sequence where the ratio is one of a sequence")


def _row_extreme(key: str, region: str, s: PeerSettings, reduce: str) -> DocumentMetric:
    words = "smallest" if reduce == "min" else "largest"
    meaning = f"{words} share, over rows with trained tokens, of a row's tokens that are clipped"
    if s.of_documents:
        return _per_document(key, meaning, functools.partial(_beyond_of, region, s.clip), reduce)
    return DocumentMetric(key, meaning, "1", (Clip(region, s.clip.anchor),), functools.partial(_extreme_share, reduce))


def _extreme_share(reduce: str, tokens_N: Tensor, clipped_N: Tensor) -> float:
    return statistic(reduce, clipped_N / tokens_N)


# ---- verl ----------------------------------------------------------------------------------------------


def _verl(s: PeerSettings) -> Iterable[Alias]:
    yield Alias(Metric("actor/ppo_kl", "mean of old - policy, each within +-20", "nats",
                       KL("k1", "old", "policy", input_limit=20.0), Mean()), None,
                "the k1 estimate of KL(old || policy): kl/old_policy/k1_mean unless a token's log ratio is beyond 20")
    yield Alias(Metric("actor/entropy", "mean entropy (token-mean)", "nats", Entropy(), Mean()), "entropy/policy/mean")
    yield Alias(Metric("actor/kl_loss", "mean k3 estimate of KL(policy || ref), log ratio within +-20, estimate within "
                       "+-10 (low_var_kl, token-mean)", "nats", KL("k3", "policy", "ref", 20.0, 10.0), Mean()), None,
                "kl/policy_ref/k3_mean unless a clamp binds")
    if s.clip is not None and s.kind in ("ppo", "gspo", "gspo_token", "cispo"):
        region = "outside" if s.kind == "cispo" else "cut"
        words = "outside the clip" if s.kind == "cispo" else "where the clip acts, by the sign of the advantage"
        canonical = "clip/region/fraction" if s.kind == "cispo" else "clip/sign_aware/fraction"
        for name, which, meaning, same in (("pg_clipfrac", region, words, canonical),
                                           ("pg_clipfrac_lower", "cut_dual", "above the dual bound with a negative "
                                            "advantage", "clip/dual/fraction")):
            if s.of_documents and which != "cut_dual":
                yield Alias(_token_share(f"actor/{name}", which, s.clip, f"share of tokens {meaning}"), same)
            elif not s.of_documents:
                yield Alias(Metric(f"actor/{name}", f"share of tokens {meaning}", "1", Clip(which, s.clip.anchor),
                                   Mean()), same)
    yield from _verl_mismatch(s)


def _verl_mismatch(s: PeerSettings) -> Iterable[Alias]:
    name = "rollout_corr"
    yield Alias(Metric(f"{name}/kl", "mean of sampler - old", "nats", KL("k1", "sampler", "old"), Mean()),
                "kl/sampler_old/k1_mean")
    yield Alias(Metric(f"{name}/k3_kl", "mean k3 estimate of KL(sampler || old)", "nats", KL("k3", "sampler", "old"),
                       Mean()), "kl/sampler_old/k3_mean")
    for key, meaning, columns, make, reduce in (
            ("training_log_ppl", "-mean old log-probability", 1, _negated_mean, "mean"),
            ("training_ppl", "exp(-mean old log-probability)", 1, _perplexity, "mean"),
            ("rollout_log_ppl", "-mean sampler log-probability", 2, _negated_mean, "mean"),
            ("rollout_ppl", "exp(-mean sampler log-probability)", 2, _perplexity, "mean"),
            ("log_ppl_diff", "mean of sampler - old", 3, _negated_mean, "mean"),
            ("log_ppl_abs_diff", "|mean of sampler - old|", 3, _absolute_mean, "mean"),
            ("log_ppl_diff_max", "mean of sampler - old", 3, _negated_mean, "max"),
            ("log_ppl_diff_min", "mean of sampler - old", 3, _negated_mean, "min"),
            ("ppl_ratio", "exp(mean of sampler - old)", 3, _perplexity, "mean"),
            ("chi2_seq", "exp(2 sum of (old - sampler)), the sum within +-20; less 1", 3, _squared_product, "mean")):
        column = {1: LogProb("old"), 2: LogProb("sampler"), 3: LogRatio("old", "sampler")}[columns]
        unit = "nats" if "log" in key else "1"
        words = {"mean": "mean", "max": "largest", "min": "smallest"}[reduce] + " over sequences of"
        yield Alias(DocumentMetric(f"{name}/{key}", f"{words} {meaning}", unit, (column,),
                                   functools.partial(_reduced, make, reduce, None)))
    yield Alias(Metric(f"{name}/chi2_token", "mean of exp(2 (old - sampler)), the difference within +-20; less 1", "1",
                       _SquaredRatioLessOne(), Mean()))
    raw, applied = Extra("raw_weight"), Extra("applied_weight")
    yield Alias(Metric(f"{name}/rollout_is_mean", "mean correction weight after truncation", "1", applied, Mean()),
                "weight/applied/mean")
    yield Alias(Metric(f"{name}/rollout_is_std", "standard deviation of the weights after truncation", "1", applied,
                       Deviation(1.0)), "weight/applied/std")
    yield Alias(Metric(f"{name}/rollout_is_max", "largest correction weight before truncation", "1", raw, Maximum()),
                "weight/raw/max")
    yield Alias(Metric(f"{name}/rollout_is_min", "smallest correction weight before truncation", "1", raw, Minimum()),
                "weight/raw/min")
    yield Alias(Metric(f"{name}/rollout_is_eff_sample_size", "1 / mean of squared (truncated weight / mean truncated "
                       "weight)", "1", applied, EffectiveSampleSize(share=True)), None,
                "a share between 0 and 1, of truncated weights")


@dataclass(frozen=True)
class _SquaredRatioLessOne(Column):
    """exp(2 (old - sampler)) - 1, the difference held within +-20."""

    @property
    def needs(self) -> tuple[str, ...]:
        return "old", "sampler"

    def of(self, q: Quantities) -> Tensor | None:
        log_T = q.log_ratio("old", "sampler")
        return None if log_T is None else torch.expm1(2 * log_T.clamp(-20, 20))


# ---- NeMo-RL -------------------------------------------------------------------------------------------


def _nemo_rl(s: PeerSettings) -> Iterable[Alias]:
    """Sums over the step's tokens, divided by (tokens + 1e-8), so nothing gives 0."""
    mean = Mean(epsilon=1e-8)
    tokens = "; divided by tokens + 1e-8"

    def of_tokens(name: str, meaning: str, unit: str, column: Column, canonical: str | None = None) -> Alias:
        return Alias(Metric(name, f"mean of {meaning}{tokens}", unit, column, mean), None,
                     f"{canonical} up to the 1e-8" if canonical else "")

    ratio, clamped = Ratio("policy", "old"), Ratio("policy", "old", clamped=True)
    if not s.of_documents:
        yield of_tokens("probs_ratio", "the ratio", "1", ratio, "ratio/policy_old/mean")
        yield Alias(Metric("probs_ratio_min", "smallest ratio", "1", ratio, Minimum()), "ratio/policy_old/min")
        yield Alias(Metric("probs_ratio_max", "largest ratio", "1", ratio, Maximum()), "ratio/policy_old/max")
        yield of_tokens("probs_ratio_clamped", "the ratio held within the clip", "1", clamped)
        yield Alias(Metric("probs_ratio_clamped_min", "smallest ratio held within the clip", "1", clamped, Minimum()))
        yield Alias(Metric("probs_ratio_clamped_max", "largest ratio held within the clip", "1", clamped, Maximum()))
    else:
        for name, make in (("probs_ratio", _ratio_of), ("probs_ratio_clamped", functools.partial(_clamped_of, s.clip))):
            words = "documents' ratio" + (" held within the clip" if name.endswith("clamped") else "")
            yield Alias(DocumentMetric(name, f"mean over tokens of the {words}{tokens}", "1",
                                       (LogRatio("policy", "old"),),
                                       functools.partial(_token_mean, make), weighs="its trained tokens"))
            for reduce, which in (("min", "smallest"), ("max", "largest")):
                yield Alias(_per_document(f"{name}_{reduce}", f"{which} of the {words}", make, reduce))
    error = "k2" if s.kl_estimator == "k2" else "k1" if s.kl_estimator == "k1" else "k3"
    yield of_tokens("token_mult_prob_error", "exp |sampler - old|", "1", Ratio("old", "sampler", symmetric=True))
    yield of_tokens("gen_kl_error", f"the {error} estimate of KL(sampler || old)", "nats", KL(error, "sampler", "old"),
                    f"kl/sampler_old/{error}_mean")
    yield of_tokens("policy_kl_error", f"the {error} estimate of KL(old || sampler)", "nats",
                    KL(error, "old", "sampler"), f"kl/old_sampler/{error}_mean")
    yield of_tokens("js_divergence_error", "half of k3 of old and of sampler against their mixture", "nats",
                    JensenShannon("old", "sampler"))
    yield of_tokens("approx_entropy", "-(policy / sampler) log policy", "nats", SampledEntropy())
    yield of_tokens("kl_penalty", "the KL penalty, log ratio within +-20, estimate within +-10, without its "
                    "coefficient", "nats", KL(error, "policy", "ref", 20.0, 10.0))
    yield from _nemo_weights(s, mean)
    yield Alias(Metric("global_valid_toks", "tokens that count", "tokens", One(), Sum()), "tokens/trained/sum")
    yield Alias(Metric("num_valid_samples", "documents with tokens that count", "documents", One(), Count(),
                       "document"),
                "documents/trained/sum", "there: rows whose sample mask is 1, also rows without tokens")


def _nemo_weights(s: PeerSettings, mean: Mean) -> Iterable[Alias]:
    weight: Weight = "document" if s.of_documents else "token"
    each = "document" if s.of_documents else "token"
    yield Alias(Metric("sampling_importance_ratio", f"mean correction weight of a {each}, after truncation; "
                       "old / sampler where there is no correction", "1", _WeightOrRatio(), mean, weight))
    yield Alias(Metric("is_oob_ratio", f"share of {each}s whose correction weight was truncated or rejected", "1",
                       _OutOfBounds(), mean, weight), None,
                "seq-mask-tis is a gate on documents there: compare weight/kept/document_mean")


@dataclass(frozen=True)
class _WeightOrRatio(Column):
    """The correction weight as applied; old / sampler where no correction is made."""

    @property
    def needs(self) -> tuple[str, ...]:
        return "old", "sampler"

    def of(self, q: Quantities) -> Tensor | None:
        applied_T = q.extra("applied_weight")
        return q.ratio("old", "sampler") if applied_T is None else applied_T


@dataclass(frozen=True)
class _OutOfBounds(Column):
    """1 where the correction truncated or rejected the token."""

    def of(self, q: Quantities) -> Tensor | None:
        dropped_T, truncated_T = Dropped().of(q), Truncated().of(q)
        if dropped_T is None or truncated_T is None:
            return None
        return torch.maximum(dropped_T, truncated_T)


SYSTEMS: Mapping[str, Callable[[PeerSettings], Iterable[Alias]]] = {
    "fast_llm": _fast_llm, "trl": _trl, "verl": _verl, "nemo_rl": _nemo_rl}
"""System -> its names."""


# ---- numbers of one document, from its tokens and the sum of one column ---------------------------------


def _per_document(key: str, meaning: str, make: Callable[..., Tensor], reduce: str,
                  of: float | None = None) -> DocumentMetric:
    """A statistic of a function of each document's log ratio (policy / old) and advantage."""
    return DocumentMetric(key, meaning, "1", (LogRatio("policy", "old"), Advantage()),
                          functools.partial(_reduced, make, reduce, of))


def _token_share(key: str, region: str, clip: ClipRule, meaning: str) -> DocumentMetric:
    return DocumentMetric(key, f"{meaning}, judged by the document's ratio", "1",
                          (LogRatio("policy", "old"), Advantage()),
                          functools.partial(_token_mean, functools.partial(_beyond_of, region, clip), epsilon=0.0),
                          weighs="its trained tokens")


def _reduced(make: Callable[..., Tensor], reduce: str, of: float | None, tokens_N: Tensor, *sums_N: Tensor) -> float:
    values_N = make(tokens_N, *sums_N)
    if reduce == "mean" and of is not None:
        return float(values_N.sum()) / of if of else math.nan
    return statistic(reduce, values_N)


def _token_mean(make: Callable[..., Tensor], tokens_N: Tensor, *sums_N: Tensor, epsilon: float = 1e-8) -> float:
    weight = float(tokens_N.sum()) + epsilon
    return float((tokens_N * make(tokens_N, *sums_N)).sum()) / weight if weight else math.nan


def _ratio_of(tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor) -> Tensor:
    return (log_ratio_N / tokens_N).exp()


def _clamped_of(clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor) -> Tensor:
    return _ratio_of(tokens_N, log_ratio_N).clamp(clip.lower, clip.upper)


def _k3_of(tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor) -> Tensor:
    mean_N = log_ratio_N / tokens_N
    return torch.expm1(mean_N) - mean_N


def _beyond_of(region: str, clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    return beyond(region, _ratio_of(tokens_N, log_ratio_N), advantage_N / tokens_N, clip).double()


def _negated_mean(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return -sum_N / tokens_N


def _absolute_mean(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return (sum_N / tokens_N).abs()


def _perplexity(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return (-sum_N / tokens_N).exp()


def _squared_product(tokens_N: Tensor, sum_N: Tensor) -> Tensor:
    return torch.expm1(2 * sum_N.clamp(-20, 20))
