"""Advantages: the reward of a completion, or of a token, relative to a baseline.

`groups` compares completions of the same prompt, `tokens` computes advantages per token, `baselines` compares the
reward-to-go of a token with a baseline at that token, and `registry` has every estimator under the name that a spec
uses. Advantages are data: computed once on all documents of a step, in float64, before anything is packed or split.
"""

from workbench.rollouts.advantages.baselines import optimal_token_baseline, remax_advantages, rewards_to_go
from workbench.rollouts.advantages.groups import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rloo_advantages,
)
from workbench.rollouts.advantages.registry import ESTIMATORS, AdvantageInputs, Estimate, estimate_advantages
from workbench.rollouts.advantages.tokens import discounted_returns, gae, token_rewards, whiten

__all__ = [
    "ESTIMATORS",
    "AdvantageInputs",
    "Estimate",
    "discounted_returns",
    "estimate_advantages",
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "opo_advantages",
    "optimal_token_baseline",
    "pass_at_k_advantages",
    "remax_advantages",
    "rewards_to_go",
    "rloo_advantages",
    "token_rewards",
    "whiten",
]
