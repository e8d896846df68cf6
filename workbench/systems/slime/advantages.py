"""Options of slime's and miles' advantages, and the estimator here that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from workbench.errors import SpecError
from workbench.systems.registry import Settings, parse_settings

EPSILON = 1e-6
"""Added to a group's deviation (slime/ray/rollout.py, `_post_process_rewards`, 624b824a)."""


class AdvantageSettings(Settings):
    """Arguments of `_post_process_rewards` and `compute_advantages_and_returns` (624b824a)."""

    advantage_estimator: Literal["grpo", "gspo", "cispo"] = "grpo"
    """All three normalise rewards in their group. The others start from values, or whiten over ranks."""
    rewards_normalization: bool = True
    """Subtract the group's mean (``--disable-rewards-normalization`` leaves it out)."""
    grpo_std_normalization: bool = True
    """Divide by the group's deviation."""
    normalize_advantages: bool = False
    """Whiten over the step."""


def estimator_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings, from options by slime's names.

    Raises:
        SpecError: an unknown option, or one that has no counterpart here.
    """
    settings = parse_settings(AdvantageSettings, options, where="slime")
    if not settings.rewards_normalization or settings.normalize_advantages:
        name = "normalize_advantages" if settings.normalize_advantages else "rewards_normalization = False"
        raise SpecError(
            f"slime's advantages with {name}",
            rule="rewards that are normalised in their group, and no more, are recomputed",
            fix="leave advantages out: the recorded ones are then taken as they are",
        )
    scale = "std" if settings.grpo_std_normalization else "none"
    return "grpo", {"scale": scale, "epsilon": EPSILON, "masked_in_baseline": True}
