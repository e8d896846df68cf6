"""Options of PrimeIntellect-ai/prime-rl, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workbench.systems.registry import Settings

OF_THE_TYPE = {"default": ("dppo_mask_low", "dppo_mask_high"), "ipo": ("ipo_threshold",), "custom": ()}
"""Type -> options that only it has."""


class PrimeSettings(Settings):
    """`DefaultLossConfig` and `IPOLossConfig` (prime_rl/configs/trainer.py, 559b4477), and the scales of a step."""

    type: Literal["default", "ipo", "custom"] = "default"
    """Loss of the component rl."""
    dppo_mask_low: float = Field(0.2, ge=0)
    """default: greatest fall of the probability of a token without a positive advantage."""
    dppo_mask_high: float = Field(0.2, ge=0)
    """default: greatest rise of that of a token with a positive advantage."""
    ipo_threshold: float = Field(0.1, ge=0)
    """ipo: greatest change of the probability, either way."""
    adv_tau: float = Field(1.0, ge=0)
    """Multiplies advantages."""
    kl_tau: float = Field(1e-3, ge=0)
    """Weight of the squared log ratio."""
    rl_scale: float | None = Field(None, gt=0)
    """Given: tokens of the component in the whole batch."""
    ce_scale: float | None = Field(None, gt=0)
    """Given: tokens of the component ce in the whole batch."""
    ref_kl_scale: float | None = Field(None, gt=0)
    """Given: tokens of the component ref_kl in the whole batch."""

    @model_validator(mode="after")
    def _options_of_the_type(self) -> PrimeSettings:
        for kind, names in OF_THE_TYPE.items():
            misplaced = [name for name in names if kind != self.type and name in self.model_fields_set]
            if misplaced:
                raise ValueError(f"{', '.join(misplaced)} is an option of type {kind!r}, not of {self.type!r}")
        return self
