"""Metrics of OpenRLHF's policy loss, by its definitions. See `workbench.systems.metrics`.

Plain means over the tokens of one micro-batch, for any denominator of the loss. Read from OpenRLHF/OpenRLHF 3c3be623.

Letters: P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from workbench.metrics.quantities import KL, PolicyCut
from workbench.systems.metrics import Alias, PeerSettings, token_metric


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


def of_pairs(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> dict[str, float]:
    """Return mean implied rewards of preference pairs: beta times the implied reward of each completion."""
    return {
        "chosen_reward_mean": float(beta * chosen_P.detach().mean()),
        "rejected_reward_mean": float(beta * rejected_P.detach().mean()),
    }
