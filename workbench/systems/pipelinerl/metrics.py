"""Metrics of PipelineRL, by its definitions. See the package docstring.

Most numbers are sums over documents of the document's token mean; PipelineRL divides them by samples when it logs. Read
from ServiceNow/PipelineRL 58d39345.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.losses.terms import LossInputs
from workbench.metrics.definitions import Metric
from workbench.metrics.quantities import (
    KL,
    Advantage,
    Clip,
    ClipRule,
    Column,
    Entropy,
    LogProb,
    LogRatio,
    One,
    Quantities,
    Ratio,
)
from workbench.metrics.values import Maximum, Minimum, Share, SquaredSum, Sum
from workbench.systems.alias import Alias, PeerSettings
from workbench.systems.document_metrics import outside_clip_of, per_document

LEFT_OUT = {
    "*": "without a trained token PipelineRL reports input_size only; here sums are 0, and extremes infinite",
}


@dataclass(frozen=True)
class Reward(Column):
    """The reward of the token's document."""

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        return None if q.inputs.rewards_T is None else q.inputs.rewards_T.double()


@dataclass(frozen=True)
class FromReference(Column):
    """1 where |log(ref / policy)| is above a limit."""

    limit: float

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Column.needs`."""
        return "ref", "policy"

    def of(self, q: Quantities) -> Tensor | None:
        """See `Column.of`."""
        distance_T = q.log_ratio("ref", "policy")
        return None if distance_T is None else (distance_T.abs() > self.limit).double()


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield sums over documents of token means, extremes over tokens, and sums of ratios over tokens."""
    over = Share(1 if s.num_documents is None else s.num_documents)
    clamp = None if s.spec is None else s.spec.kl.input_clamp

    def mean(name: str, meaning: str, unit: str, column: Column) -> Alias:
        return Alias(
            Metric(name, f"sum over documents of the document's mean {meaning}", unit, column, over, "document")
        )

    def extremes(name: str, meaning: str, unit: str, column: Column) -> Iterable[Alias]:
        yield Alias(Metric(f"max_{name}", f"largest {meaning}", unit, column, Maximum()))
        yield Alias(Metric(f"min_{name}", f"smallest {meaning}", unit, column, Minimum()))

    penalty = KL("k3", "policy", "ref", clamp)
    for name, meaning, unit, column in (
        ("reward", "reward", "reward", Reward()),
        ("advantage", "advantage", "reward", Advantage()),
        ("kl", "k3 estimate of KL(policy || ref), log ratio clamped", "nats", penalty),
    ):
        yield mean(name, meaning, unit, column)
        yield from extremes(name, meaning, unit, column)
    yield mean("entropy", "entropy", "nats", Entropy())
    yield mean("old_logprobs", "old log-probability", "nats", LogProb("old"))
    yield mean("new_logprobs", "log-probability", "nats", LogProb("policy"))
    yield mean("ref_logprobs", "log-probability of the reference", "nats", LogProb("ref"))
    yield mean("kl_new_old", "r - 1 - log r", "nats", KL("k3", "old", "policy"))
    yield mean("mean_abs_log_ratio_new_old", "|log ratio|", "nats", LogRatio("policy", "old", absolute=True))
    ratio = Ratio("policy", "old", clamped=s.kind == "cispo")
    yield mean("ratio_new_old", "ratio (of reinforce: as truncated)", "1", ratio)
    yield Alias(Metric("ratio_new_old_sum", "sum of ratios over tokens", "1", ratio, Sum()))
    yield Alias(Metric("ratio_new_old_squared_sum", "sum of squared ratios over tokens", "1", ratio, SquaredSum()))
    yield mean("ratio_ref_new", "ratio ref / policy", "1", Ratio("ref", "policy"))
    yield mean("ratio_ref_old", "ratio ref / old", "1", Ratio("ref", "old"))
    if clamp is not None:
        yield mean(
            "clamp_log_ratio_ref_new_indicator",
            "share of tokens at which the KL's log ratio is clamped",
            "1",
            FromReference(clamp),
        )
    yield Alias(Metric("num_output_tokens_sum", "tokens that count", "tokens", One(), Sum()))
    if s.of_documents:
        yield Alias(
            per_document(
                "clamp_log_ratio_new_old_indicator",
                "documents whose ratio lies outside the clip",
                functools.partial(outside_clip_of, "outside", s.clip),
                "sum",
            ),
            note="documents of weight 0 are left out there (`clipped_documents`)",
        )
    elif s.clip is not None:
        yield mean(
            "clamp_log_ratio_new_old_indicator",
            "share of tokens whose ratio lies outside the clip",
            "1",
            Clip("outside"),
        )


def token_weight_numbers(inputs: LossInputs, weights_T: Tensor) -> Mapping[str, float]:
    """Return statistics of the weights of tokens: sum over documents of means, largest and smallest.

    Args:
        inputs: inputs of the loss.
        weights_T: [T] weights of the loss, see `workbench.reduction.weights`.
    """
    with torch.no_grad():
        counts_T = inputs.counts_T
        trained_T = weights_T[counts_T]
        if not len(trained_T):
            return {}
        return {
            "token_weight": float((trained_T / inputs.document_lengths_T[counts_T]).sum()),
            "max_token_weight": float(trained_T.max()),
            "min_token_weight": float(trained_T.min()),
        }


def clipped_documents(ratio_T: Tensor, inputs: LossInputs, weights_T: Tensor, clip: ClipRule) -> float:
    """Count documents whose ratio lies outside the clip, without those of weight 0.

    Args:
        ratio_T: [T] ratio of the token's document.
        inputs: inputs of the loss.
        weights_T: [T] weights of the loss.
        clip: its bounds.
    """
    with torch.no_grad():
        outside_T = ((ratio_T < clip.lower) | (ratio_T > clip.upper)) & inputs.counts_T & (weights_T > 0)
        return float(torch.where(outside_T, 1 / inputs.document_lengths_T, 0.0).sum())
