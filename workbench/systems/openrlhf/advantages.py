"""OpenRLHF's advantage estimators (`compute_advantages_and_returns`, trainer/ppo_utils/experience_maker.py, 0.11.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from workbench.errors import SpecError
from workbench.systems.registry import Settings, parse_settings

EPSILON = 1e-9
"""Added to a group's deviation (0.11.2)."""


class AdvantageSettings(Settings):
    """Options of ``--algo.advantage`` (openrlhf/cli/train_ppo_ray.py, 0.11.2)."""

    estimator: Literal["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"] = (
        "gae"
    )
    """Its name."""


def estimator_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings, from options by OpenRLHF's names.

    Rewards are those of rows: with a KL penalty in the reward, or a length penalty, leave advantages out.

    Raises:
        SpecError: an unknown option, or an estimator that is not recomputed.
    """
    settings = parse_settings(AdvantageSettings, options, where="openrlhf")
    of_groups: dict[str, tuple[str, dict[str, Any]]] = {
        "rloo": ("rloo", {}),
        "group_norm": ("grpo", {"scale": "std", "epsilon": EPSILON}),
        "dr_grpo": ("grpo", {"scale": "none", "epsilon": EPSILON}),
    }
    if settings.estimator not in of_groups:
        raise SpecError(
            f"OpenRLHF's advantages of {settings.estimator}",
            rule=f"{', '.join(of_groups)} are recomputed",
            fix="leave advantages out: the recorded ones are then taken as they are",
        )
    name, own = of_groups[settings.estimator]
    return name, {**own, "masked_in_baseline": True}
