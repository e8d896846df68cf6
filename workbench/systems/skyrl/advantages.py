"""SkyRL's advantage estimators, by the names of its registry (skyrl/backends/skyrl_train/utils/ppo_utils.py, 0.3.0)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from workbench.errors import SpecError
from workbench.systems.registry import Settings, parse_settings

EPSILON = 1e-6
"""Added to a group's deviation (`compute_grpo_outcome_advantage`)."""


class AdvantageSettings(Settings):
    """Options of `compute_advantages_and_returns`."""

    advantage_estimator: Literal["grpo", "rloo", "gae", "reinforce++", "maxrl"] = "grpo"
    """Name in the registry."""
    grpo_norm_by_std: bool = True
    """grpo: divide by the group's deviation."""


def estimator_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings, from options by SkyRL's names.

    Rows without trained tokens count in their group; the only row of a prompt keeps its reward (grpo) or gets 0 (rloo).

    Raises:
        SpecError: an unknown option, or an estimator that is not recomputed.
    """
    settings = parse_settings(AdvantageSettings, options, where="skyrl")
    if settings.advantage_estimator == "grpo":
        scale = "std" if settings.grpo_norm_by_std else "none"
        return "grpo", {"scale": scale, "epsilon": EPSILON, "singleton": "reward", "masked_in_baseline": True}
    if settings.advantage_estimator == "rloo":
        return "rloo", {"masked_in_baseline": True}
    raise SpecError(
        f"SkyRL's advantages of {settings.advantage_estimator}",
        rule="grpo and rloo are recomputed",
        fix="leave advantages out: the recorded ones are then taken as they are",
    )
