"""Metrics of OpenRLHF's policy loss, by its definitions. See the package docstring.

Plain means over the tokens of one micro-batch, for any denominator of the loss. Read from OpenRLHF/OpenRLHF 3c3be623.

Letters: P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from workbench.metrics.definitions import Metric
from workbench.metrics.quantities import KL, PolicyCut
from workbench.metrics.values import Mean
from workbench.systems.alias import Alias, PeerSettings


def names(s: PeerSettings) -> Iterable[Alias]:
    """Yield means over tokens."""
    yield Alias(
        Metric(
            "clip_ratio", "share of tokens where the clip acts, by the sign of the advantage", "1", PolicyCut(), Mean()
        ),
        None,
        "not where the dual clip acts",
    )
    yield Alias(
        Metric("ppo_kl", "mean of old - policy", "nats", KL("k1", "old", "policy"), Mean()),
        "kl/old_policy/k1_mean",
        "against the old policy, also if the ratio is against the sampler",
    )
    if s.spec is not None and s.spec.correction.acts:
        yield Alias(
            Metric("vllm_kl", "mean of sampler - old", "nats", KL("k1", "sampler", "old"), Mean()),
            "kl/sampler_old/k1_mean",
            "only with a correction",
        )


def of_pairs(chosen_P: Tensor, rejected_P: Tensor, beta: float) -> dict[str, float]:
    """Return mean implied rewards of preference pairs: beta times the implied reward of each completion."""
    return {
        "chosen_reward_mean": float(beta * chosen_P.detach().mean()),
        "rejected_reward_mean": float(beta * rejected_P.detach().mean()),
    }
