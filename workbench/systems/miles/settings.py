"""Options of radixark/miles, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from workbench.systems.slime.settings import SlimeSettings


class MilesSettings(SlimeSettings):
    """Arguments of miles' policy loss (miles/utils/arguments.py, 31f1ca96): those of slime, from which it comes."""

    advantage_estimator: Literal["grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"] = "grpo"
    """gspo: the ratio is one of a sample. The others share one loss."""
