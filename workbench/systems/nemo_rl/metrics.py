"""Metrics of NeMo-RL, by its definitions. See `workbench.systems.metrics`.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.losses.terms import Term
from workbench.metrics.definitions import Weight
from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import (
    KL,
    Column,
    Dropped,
    Estimator,
    JensenShannon,
    LogProb,
    LogRatio,
    One,
    PolicyName,
    Ratio,
    SampledEntropy,
    Truncated,
)
from workbench.metrics.values import Count, Maximum, Mean, Minimum, Reducer, Share, Sum
from workbench.reduction.partial import Scalar
from workbench.specs.losses import CorrectionSpec
from workbench.systems.metrics import (
    Alias,
    Derived,
    PeerSettings,
    clamped_of,
    document_metric,
    per_document,
    ratio_of,
    token_mean,
    token_metric,
)
from workbench.systems.nemo_rl.settings import EPSILON

LEFT_OUT: Mapping[str, str] = {
    "sampling_importance_ratio": "with sequence ratios NeMo multiplies [B, 1] by [B] and reports about B times the "
    "mean weight; here it is the mean weight",
    "kl_penalty": "NeMo reports its term of the loss, weighted and reduced like the loss; here, where only a batch is "
    "known, the mean over tokens",
}
"""Name -> what the system reports there in some case, and what is reported here instead."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield sums over the step's tokens, divided by (tokens + 1e-8), so that a mean over nothing is 0."""
    mean = _over(s.given.tokens)
    tokens = "; divided by tokens + 1e-8"

    def of_tokens(name: str, meaning: str, unit: str, column: Column, canonical: str | None = None) -> Alias:
        note = f"{canonical} up to the 1e-8" if canonical else ""
        return token_metric(name, f"mean of {meaning}{tokens}", unit, column, mean, note=note)

    yield from _document_ratios(s, tokens) if s.of_documents else _ratios(s, mean, tokens)
    error: Estimator = s.kl_estimator if s.kl_estimator in ("k1", "k2") else "k3"
    yield of_tokens("token_mult_prob_error", "exp |sampler - old|", "1", Ratio("old", "sampler", symmetric=True))
    errors: tuple[tuple[str, PolicyName, PolicyName], ...] = (("gen", "sampler", "old"), ("policy", "old", "sampler"))
    for name, first, second in errors:
        meaning = f"the {error} estimate of KL({first} || {second})"
        column, same = KL(error, first, second), f"kl/{first}_{second}/{error}_mean"
        yield of_tokens(f"{name}_kl_error", meaning, "nats", column, same)
    meaning = "half the k3 of old and of sampler against their mixture"
    yield of_tokens("js_divergence_error", meaning, "nats", JensenShannon("old", "sampler"))
    yield of_tokens("approx_entropy", "-(policy / sampler) log policy", "nats", SampledEntropy())
    meaning = "the KL penalty, log ratio within +-20, estimate within +-10, without its coefficient"
    yield of_tokens("kl_penalty", meaning, "nats", KL(error, "policy", "ref", 20.0, 10.0))
    yield from _weights(s, mean)
    yield token_metric("global_valid_toks", "tokens that count", "tokens", One(), Sum(), canonical="tokens/trained/sum")
    yield token_metric(
        "num_valid_samples",
        "documents with tokens that count",
        "documents",
        One(),
        Count(),
        "document",
        canonical="documents/trained/sum",
        note="there: rows whose sample mask is 1, also rows without tokens",
    )


def _over(count: float | None) -> Reducer:
    """Return a mean over the batch, or over the given count of the whole step."""
    return Mean(epsilon=EPSILON) if count is None else Share(count, EPSILON)


def _ratios(s: PeerSettings, mean: Reducer, tokens: str) -> Iterable[Alias]:
    plain = Ratio("policy", "old")
    columns: tuple[Column, Column] = plain, Ratio("policy", "old", clamped=True)
    unit, noun, clips = "1", "ratio", True
    if s.kind == "reinforce":
        columns, unit, noun, clips = (LogProb("policy"),) * 2, "nats", "log-probability (there is no ratio)", False
    elif s.kind == "on_policy":
        columns, noun, clips = (One(), One()), "ratio, fixed at 1", False
    for name, column in zip(("probs_ratio", "probs_ratio_clamped"), columns, strict=True):
        clamped = " clamped to the clip" if clips and column is not plain else ""
        same = "ratio/policy_old" if column is plain else None
        note = f"{same}/mean up to the 1e-8" if same else ""
        yield token_metric(name, f"mean of the {noun}{clamped}{tokens}", unit, column, mean, note=note)
        for reduce, which, reducer in (("min", "smallest", Minimum()), ("max", "largest", Maximum())):
            canonical, meaning = same and f"{same}/{reduce}", f"{which} {noun}{clamped}"
            yield token_metric(f"{name}_{reduce}", meaning, unit, column, reducer, canonical=canonical)


def _document_ratios(s: PeerSettings, tokens: str) -> Iterable[Alias]:
    assert s.clip is not None, "a loss with ratios of documents clips them"
    epsilon = 0.0 if s.spec is None else s.spec.compat.scaling.mean_epsilon
    for name, make in (("probs_ratio", ratio_of), ("probs_ratio_clamped", functools.partial(clamped_of, s.clip))):
        ratio = "documents' ratio" + (" clamped to the clip" if name.endswith("clamped") else "")
        make = functools.partial(make, epsilon=epsilon)
        read = functools.partial(token_mean, make, epsilon=EPSILON, of=s.given.tokens)
        meaning = f"mean over tokens of the {ratio}{tokens}"
        yield document_metric(name, meaning, "1", (LogRatio("policy", "old"),), read, by_length=True)
        for reduce, which in (("min", "smallest"), ("max", "largest")):
            yield per_document(f"{name}_{reduce}", f"{which} of the {ratio}", make, reduce)


def _weights(s: PeerSettings, mean: Reducer) -> Iterable[Alias]:
    correction = CorrectionSpec() if s.spec is None else s.spec.correction
    per_document_weight = s.of_documents or correction.ratio == "document_sum"
    weight: Weight = "document" if per_document_weight else "token"
    over_documents = _over(s.given.documents)
    meaning = f"mean correction weight of a {weight}, after truncation; old / sampler without a correction"
    over = over_documents if per_document_weight else mean
    yield token_metric("sampling_importance_ratio", meaning, "1", _WeightOrRatio(), over, weight)
    out_of_bounds = Derived(torch.maximum, (Dropped(), Truncated()))
    if correction.gate == "none":
        meaning = "share of tokens whose correction weight was truncated or rejected"
        yield token_metric("is_oob_ratio", meaning, "1", out_of_bounds, mean)
    else:
        yield token_metric(
            "is_oob_ratio",
            "share of documents that the gate rejected",
            "1",
            out_of_bounds,
            over_documents,
            "document",
            note="divided by all documents + 1e-8, also those without tokens, which are always kept",
        )


@dataclass(frozen=True)
class _WeightOrRatio(Column):
    """The correction weight as applied; old / sampler without a correction."""

    @property
    def needs(self) -> tuple[str, ...]:
        return "old", "sampler"

    def of(self, q: Quantities) -> Tensor | None:
        applied_T = q.extra("applied_weight")
        return q.ratio("old", "sampler") if applied_T is None else applied_T


# ---- numbers of losses -------------------------------------------------------------------------------------


def of_the_loss(terms: Mapping[str, Term], scalars: Mapping[str, Scalar]) -> dict[str, float]:
    """Return the loss, and the terms that are reported without their coefficients.

    Formula: ``kl_penalty``, ``positive_nll_loss``: the term of the loss over its coefficient; 0 if there is none.
    """

    def bare(name: str) -> float:
        return _number(scalars[name]) / terms[name].coefficient if name in terms else 0.0

    return {"loss": _number(scalars["total"]), "kl_penalty": bare("kl"), "positive_nll_loss": bare("positive_nll")}


def of_pairs(
    terms: Mapping[str, Term], scalars: Mapping[str, Scalar], rewards_N: Tensor, chosen_P: Tensor, rejected_P: Tensor
) -> dict[str, float]:
    """Return the metrics of preference pairs: rows 2i are chosen, rows 2i + 1 rejected.

    Terms are "preference", and perhaps "sft". Weights of a pair are ``chosen_P`` in its own metrics and those of its
    chosen row, and ``rejected_P`` in those of its rejected row.
    """
    rewards_N = rewards_N.detach()
    right_P = (rewards_N[::2] > rewards_N[1::2]).to(rewards_N.dtype)
    metrics = {
        "loss": _number(scalars["total"]),
        "accuracy": float((chosen_P * right_P).sum()),
        "rewards_chosen_mean": float((chosen_P * rewards_N[::2]).sum()),
        "rewards_rejected_mean": float((rejected_P * rewards_N[1::2]).sum()),
    }
    if "sft" in terms:
        plain = {name: float((chosen_P * term.values_T.detach()).sum()) for name, term in terms.items()}
        metrics["preference_loss"] = plain["preference"]
        metrics["sft_loss"] = -plain["sft"] if terms["sft"].coefficient else 0.0
    return metrics


def _number(scalar: Scalar) -> float:
    return float(scalar.value.detach())


def of_values(
    term: Term, values_T: Tensor, returns_T: Tensor, loss_mask_T: Tensor, tokens: float | None
) -> dict[str, float]:
    """Return the metrics of a critic: means over the tokens of the whole batch, extremes over those that are here."""
    mean = _over(tokens)

    def of(column_T: Tensor) -> float:
        return mean.over(column_T, loss_mask_T).finish()

    clipped_T = torch.zeros_like(values_T) if term.clipped_T is None else term.clipped_T.to(values_T.dtype)
    trained = values_T[loss_mask_T] if loss_mask_T.any() else torch.zeros(1)
    return {
        "vf_clipfrac": of(clipped_T),
        "returns_mean": of(returns_T),
        "values_mean": of(values_T),
        "values_min": float(trained.min()),
        "values_max": float(trained.max()),
        "returns_sq_mean": of(returns_T.square()),
        "residual_sq_mean": of((returns_T - values_T).square()),
    }
