"""Metrics of NeMo-RL, by its definitions. See the package docstring.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.losses.terms import Term
from workbench.metrics.definitions import DocumentMetric, Metric, Weight
from workbench.metrics.quantities import (
    KL,
    Column,
    Dropped,
    JensenShannon,
    LogProb,
    LogRatio,
    One,
    Quantities,
    Ratio,
    SampledEntropy,
    Truncated,
)
from workbench.metrics.values import (
    Count,
    Maximum,
    Mean,
    Minimum,
    Reducer,
    Share,
    Sum,
)
from workbench.reduction.partial import Scalar
from workbench.specs.losses import CorrectionSpec
from workbench.systems.alias import Alias, PeerSettings
from workbench.systems.document_metrics import (
    clamped_of,
    per_document,
    ratio_of,
    token_mean,
)

EPSILON = 1e-8
"""Added to every count."""

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
        return Alias(
            Metric(name, f"mean of {meaning}{tokens}", unit, column, mean),
            None,
            f"{canonical} up to the 1e-8" if canonical else "",
        )

    yield from _ratios(s, mean, tokens)
    error = "k2" if s.kl_estimator == "k2" else "k1" if s.kl_estimator == "k1" else "k3"
    yield of_tokens("token_mult_prob_error", "exp |sampler - old|", "1", Ratio("old", "sampler", symmetric=True))
    yield of_tokens(
        "gen_kl_error",
        f"the {error} estimate of KL(sampler || old)",
        "nats",
        KL(error, "sampler", "old"),
        f"kl/sampler_old/{error}_mean",
    )
    yield of_tokens(
        "policy_kl_error",
        f"the {error} estimate of KL(old || sampler)",
        "nats",
        KL(error, "old", "sampler"),
        f"kl/old_sampler/{error}_mean",
    )
    yield of_tokens(
        "js_divergence_error",
        "half the k3 of old and of sampler against their mixture",
        "nats",
        JensenShannon("old", "sampler"),
    )
    yield of_tokens("approx_entropy", "-(policy / sampler) log policy", "nats", SampledEntropy())
    yield of_tokens(
        "kl_penalty",
        "the KL penalty, log ratio within +-20, estimate within +-10, without its coefficient",
        "nats",
        KL(error, "policy", "ref", 20.0, 10.0),
    )
    yield from _weights(s, mean)
    yield Alias(Metric("global_valid_toks", "tokens that count", "tokens", One(), Sum()), "tokens/trained/sum")
    yield Alias(
        Metric("num_valid_samples", "documents with tokens that count", "documents", One(), Count(), "document"),
        "documents/trained/sum",
        "there: rows whose sample mask is 1, also rows without tokens",
    )


def _over(count: float | None) -> Reducer:
    """Return a mean over the batch, or over the given count of the whole step."""
    return Mean(epsilon=EPSILON) if count is None else Share(count, EPSILON)


def _ratios(s: PeerSettings, mean: Reducer, tokens: str) -> Iterable[Alias]:
    if s.of_documents:
        yield from _document_ratios(s, tokens)
        return
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
        yield Alias(
            Metric(name, f"mean of the {noun}{clamped}{tokens}", unit, column, mean),
            None,
            f"{same}/mean up to the 1e-8" if same else "",
        )
        yield Alias(Metric(f"{name}_min", f"smallest {noun}{clamped}", unit, column, Minimum()), same and f"{same}/min")
        yield Alias(Metric(f"{name}_max", f"largest {noun}{clamped}", unit, column, Maximum()), same and f"{same}/max")


def _document_ratios(s: PeerSettings, tokens: str) -> Iterable[Alias]:
    epsilon = 0.0 if s.spec is None else s.spec.scaling.mean_epsilon
    for name, make in (("probs_ratio", ratio_of), ("probs_ratio_clamped", functools.partial(clamped_of, s.clip))):
        ratio = "documents' ratio" + (" clamped to the clip" if name.endswith("clamped") else "")
        make = functools.partial(make, epsilon=epsilon)
        yield Alias(
            DocumentMetric(
                name,
                f"mean over tokens of the {ratio}{tokens}",
                "1",
                (LogRatio("policy", "old"),),
                functools.partial(token_mean, make, epsilon=EPSILON, of=s.given.tokens),
                weight="its trained tokens",
            )
        )
        for reduce, which in (("min", "smallest"), ("max", "largest")):
            yield Alias(per_document(f"{name}_{reduce}", f"{which} of the {ratio}", make, reduce))


def _weights(s: PeerSettings, mean: Reducer) -> Iterable[Alias]:
    correction = CorrectionSpec() if s.spec is None else s.spec.correction
    per_document_weight = s.of_documents or correction.ratio == "document_sum"
    weight: Weight = "document" if per_document_weight else "token"
    yield Alias(
        Metric(
            "sampling_importance_ratio",
            f"mean correction weight of a {weight}, after truncation; old / sampler without a correction",
            "1",
            _WeightOrRatio(),
            _over(s.given.documents) if per_document_weight else mean,
            weight,
        )
    )
    if correction.gate == "none":
        yield Alias(
            Metric(
                "is_oob_ratio",
                "share of tokens whose correction weight was truncated or rejected",
                "1",
                _OutOfBounds(),
                mean,
            )
        )
    else:
        yield Alias(
            Metric(
                "is_oob_ratio",
                "share of documents that the gate rejected",
                "1",
                _OutOfBounds(),
                _over(s.given.documents),
                "document",
            ),
            None,
            "divided by all documents + 1e-8, also those without tokens, which are always kept",
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


@dataclass(frozen=True)
class _OutOfBounds(Column):
    """1 where the correction truncated or rejected the token."""

    def of(self, q: Quantities) -> Tensor | None:
        dropped_T, truncated_T = Dropped().of(q), Truncated().of(q)
        if dropped_T is None or truncated_T is None:
            return None
        return torch.maximum(dropped_T, truncated_T)


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

    Args:
        terms: "preference", and perhaps "sft".
        scalars: their sums.
        rewards_N: [N] reward of each row.
        chosen_P: [P] weight of each pair, in its own metrics and those of its chosen row.
        rejected_P: [P] the same for its rejected row.
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
    trained = values_T[loss_mask_T]
    return {
        "vf_clipfrac": of(clipped_T),
        "returns_mean": of(returns_T),
        "values_mean": of(values_T),
        "values_min": float(trained.min()) if len(trained) else 0.0,
        "values_max": float(trained.max()) if len(trained) else 0.0,
        "returns_sq_mean": of(returns_T.square()),
        "residual_sq_mean": of((returns_T - values_T).square()),
    }
