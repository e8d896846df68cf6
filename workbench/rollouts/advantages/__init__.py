"""Advantages: how much better an answer, or a token, did than what was to be expected of it.

`groups` compares whole answers with the others to the same prompt, `tokens` gives each token its own share,
`baselines` compares what is still to come at a token with what was to be expected there, and
`registry` has every estimator under the name that a spec uses. All of it is data: computed once on all documents of
a step, in float64, before anything is packed or split.
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
