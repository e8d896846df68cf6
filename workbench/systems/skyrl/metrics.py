"""Metrics of SkyRL, by its definitions. See `workbench.systems.metrics`.

Means over the tokens of a micro-batch, or over all its rows; SkyRL logs the mean over micro-batches and ranks. Its
statistics of the correction (`is_ratio_std`, `..._max`, `..._min`, shares over one bound) are not recomputed, nor are
those of a correction with several parts, which SkyRL counts one after the other. Read from NovaSky-AI/SkyRL 0.3.0.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.metrics.quantities import KL, Advantage, Clip, Column, Cut, Dropped, Entropy, PolicyCut, Ratio, Truncated
from workbench.metrics.values import Mean
from workbench.specs.losses import CorrectionSpec
from workbench.systems.metrics import Alias, Derived, PeerSettings, document_metric, token_metric
from workbench.systems.skyrl.settings import LOG_CLAMP, OUTPUT_CLAMP

PREFIX = "policy/loss_metrics"
SHARES = {
    "token": "token_mask_ratio",
    "document_mean": "geo_sequence_mask_masked_ratio",
    "document_sum": "product_sequence_mask_masked_ratio",
    "document_max": "outlier_seq_masked_ratio",
    "document_min": "outlier_seq_masked_ratio",
}
"""Level of the only gate -> SkyRL's name of the share that it drops."""


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield SkyRL's metrics of a loss."""
    yield _mean(f"{PREFIX}/clip_ratio", *_clip(s))
    yield _mean("policy/policy_entropy", "mean entropy", Entropy(), "nats")
    if s.spec is None:
        return
    if s.spec.kl.coefficient and s.spec.kl.placement == "loss":
        limits = (LOG_CLAMP, OUTPUT_CLAMP) if s.kl_estimator == "k3" else (None, None)
        column = KL("k3" if s.kl_estimator == "squared" else s.kl_estimator, "policy", "ref", *limits)
        mean = functools.partial(_mean_of_rows, s.num_documents)
        meaning = "mean over rows of the row's mean KL estimate"
        yield document_metric(
            "policy/policy_kl", meaning, "nats", (column,), mean, note="rows without tokens count as 0"
        )
    if s.spec.correction.acts and s.kind != "reinforce":
        yield _mean(f"{PREFIX}/is_ratio_mean", "mean of old / sampler", Ratio("old", "sampler"))
        yield from _corrected(s, s.spec.correction)


def _mean(key: str, meaning: str, column: Column, unit: str = "1") -> Alias:
    """Mean over tokens, 0 of none."""
    return token_metric(key, meaning, unit, column, Mean(least=1.0))


def _clip(s: PeerSettings) -> tuple[str, Column]:
    if s.kind == "cispo" and s.clip is not None:
        return "share of tokens outside the clip", Clip("outside", s.clip.anchor)
    if s.kind in ("dppo_tv", "dppo_kl"):
        column = Derived(_where_signed, (Cut("policy"), Advantage()))
        return "share of tokens outside the trust region, with an advantage", column
    if s.kind == "reinforce":
        return "share of tokens outside the bounds of the ratio", Dropped()
    return "share of tokens where the clip acts, by the sign of the advantage", PolicyCut()


def _where_signed(cut_T: Tensor, advantages_T: Tensor) -> Tensor:
    return torch.where(advantages_T != 0, cut_T, 0.0)


def _mean_of_rows(of: float | None, tokens_N: Tensor, sum_N: Tensor) -> float:
    number = float(len(tokens_N)) if of is None else of
    return float((sum_N / tokens_N.clamp_min(1)).sum()) / number if number else math.nan


def _corrected(s: PeerSettings, correction: CorrectionSpec) -> Iterable[Alias]:
    gates = correction.gates
    if not gates and correction.ratio == "token":
        yield _mean(f"{PREFIX}/tis_token_clip_high_ratio", "share of tokens whose weight is capped", Truncated())
    if len(gates) == 1:
        name = f"{PREFIX}/{SHARES[gates[0].level]}"
        if gates[0].level == "token":
            yield _mean(name, "share of tokens that are dropped", Dropped())
        else:
            read = functools.partial(_mean_of_rows, s.num_documents)
            yield document_metric(name, "share of rows that are dropped", "1", (Dropped(),), read)
