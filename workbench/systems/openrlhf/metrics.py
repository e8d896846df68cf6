"""Metrics of OpenRLHF's policy loss, by its definitions. See `workbench.systems.metrics`.

Plain means over the tokens of one micro-batch, for any denominator of the loss. Read from OpenRLHF/OpenRLHF 0.11.2.

Letters: P pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from torch import Tensor

from workbench.metrics.quantities import KL, Dropped, PolicyCut, Truncated
from workbench.specs.losses import CorrectionSpec
from workbench.systems.metrics import Alias, PeerSettings, document_metric, token_metric


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield means over tokens."""
    meaning = "share of tokens where the clip acts, by the sign of the advantage"
    yield token_metric("clip_ratio", meaning, "1", PolicyCut(), note="not where the dual clip acts")
    yield token_metric(
        "ppo_kl",
        "mean of old - policy",
        "nats",
        KL("k1", "old", "policy"),
        canonical="kl/old_policy/k1_mean",
        note="against the old policy, also if the ratio is against the sampler",
    )
    if s.spec is not None and s.spec.correction.acts:
        same, note = "kl/sampler_old/k1_mean", "only with a correction"
        column = KL("k1", "sampler", "old")
        yield token_metric("vllm_kl", "mean of sampler - old", "nats", column, canonical=same, note=note)
        yield _filtered(s, s.spec.correction)


def _filtered(s: PeerSettings, correction: CorrectionSpec) -> Alias:
    if correction.gate != "none" and correction.gate_level != "token":
        read = functools.partial(_share_of_rows, s.num_documents)
        note = "of all rows; one without tokens counts as filtered"
        return document_metric("is_filter_ratio", "share of rows that were dropped", "1", (Dropped(),), read, note=note)
    column = Dropped() if correction.rejects else Truncated()
    meaning = "share of tokens that were dropped, or whose weight was clipped"
    return token_metric("is_filter_ratio", meaning, "1", column)


def _share_of_rows(of: float | None, tokens_N: Tensor, dropped_N: Tensor) -> float:
    kept, number = float((1 - dropped_N / tokens_N).sum()), float(len(tokens_N)) if of is None else of
    return 1 - kept / number if number else math.nan


def of_pairs(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> dict[str, float]:
    """Return mean implied rewards of preference pairs: beta times the implied reward of each completion."""
    return {
        "chosen_reward_mean": float(beta * chosen_P.detach().mean()),
        "rejected_reward_mean": float(beta * rejected_P.detach().mean()),
    }
