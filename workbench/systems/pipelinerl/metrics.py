"""Metrics of PipelineRL, by its definitions. See `workbench.systems.metrics`.

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
from workbench.metrics.policy import Quantities
from workbench.metrics.quantities import KL, Advantage, Clip, ClipRule, Column, Entropy, LogProb, LogRatio, One, Ratio
from workbench.metrics.values import Maximum, Minimum, Share, SquaredSum, Sum
from workbench.systems.metrics import Alias, PeerSettings, outside, outside_clip_of, per_document, token_metric

LEFT_OUT = {"*": "without a trained token PipelineRL reports input_size only; here sums are 0, and extremes infinite"}


@dataclass(frozen=True)
class _Reward(Column):
    """The reward of the token's document."""

    def of(self, q: Quantities) -> Tensor | None:
        return None if q.inputs.rewards_T is None else q.inputs.rewards_T.double()


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield sums over documents of token means, extremes over tokens, and sums of ratios over tokens."""
    over = Share(1 if s.num_documents is None else s.num_documents)
    clamp = None if s.spec is None else s.spec.kl.input_clamp

    def mean(name: str, meaning: str, unit: str, column: Column) -> Alias:
        meaning = f"sum over documents of the document's mean {meaning}"
        return token_metric(name, meaning, unit, column, over, "document")

    for name, meaning, unit, column in (
        ("reward", "reward", "reward", _Reward()),
        ("advantage", "advantage", "reward", Advantage()),
        ("kl", "k3 estimate of KL(policy || ref), log ratio clamped", "nats", KL("k3", "policy", "ref", clamp)),
    ):
        yield mean(name, meaning, unit, column)
        yield token_metric(f"max_{name}", f"largest {meaning}", unit, column, Maximum())
        yield token_metric(f"min_{name}", f"smallest {meaning}", unit, column, Minimum())
    yield mean("entropy", "entropy", "nats", Entropy())
    yield mean("old_logprobs", "old log-probability", "nats", LogProb("old"))
    yield mean("new_logprobs", "log-probability", "nats", LogProb("policy"))
    yield mean("ref_logprobs", "log-probability of the reference", "nats", LogProb("ref"))
    yield mean("kl_new_old", "r - 1 - log r", "nats", KL("k3", "old", "policy"))
    yield mean("mean_abs_log_ratio_new_old", "|log ratio|", "nats", LogRatio("policy", "old", absolute=True))
    ratio = Ratio("policy", "old", clamped=s.kind == "cispo")
    yield mean("ratio_new_old", "ratio (of reinforce: as truncated)", "1", ratio)
    yield token_metric("ratio_new_old_sum", "sum of ratios over tokens", "1", ratio, Sum())
    yield token_metric("ratio_new_old_squared_sum", "sum of squared ratios over tokens", "1", ratio, SquaredSum())
    yield mean("ratio_ref_new", "ratio ref / policy", "1", Ratio("ref", "policy"))
    yield mean("ratio_ref_old", "ratio ref / old", "1", Ratio("ref", "old"))
    if clamp is not None:
        far = outside(LogRatio("ref", "policy", absolute=True), high=clamp)
        meaning = "share of tokens at which the KL's log ratio is clamped"
        yield mean("clamp_log_ratio_ref_new_indicator", meaning, "1", far)
    yield token_metric("num_output_tokens_sum", "tokens that count", "tokens", One(), Sum())
    name = "clamp_log_ratio_new_old_indicator"
    if s.clip is not None and s.of_documents:
        make = functools.partial(outside_clip_of, "outside", s.clip)
        note = "documents of weight 0 are left out there (`clipped_documents`)"
        yield per_document(name, "documents whose ratio lies outside the clip", make, "sum", note=note)
    elif s.clip is not None:
        yield mean(name, "share of tokens whose ratio lies outside the clip", "1", Clip("outside"))


def token_weight_numbers(inputs: LossInputs, weights_T: Tensor) -> Mapping[str, float]:
    """Return statistics of the [T] weights of a loss: sum over documents of means, largest and smallest."""
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
    """Count documents whose ratio lies outside the clip, without those of weight 0; [T] ratios are of documents."""
    with torch.no_grad():
        outside_T = ((ratio_T < clip.lower) | (ratio_T > clip.upper)) & inputs.counts_T & (weights_T > 0)
        return float(torch.where(outside_T, 1 / inputs.document_lengths_T, 0.0).sum())
