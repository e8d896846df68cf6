"""Options of OpenRLHF/OpenRLHF, by its names and with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from workbench.systems.registry import Settings

LOG_CLAMP = 20.0
"""Bound of a token's log ratio."""


OUTPUT_CLAMP = 10.0
"""Bound of a KL estimate."""


class AggregateSettings(Settings):
    """`aggregate_loss` (openrlhf/models/loss.py, 0.11.2)."""

    token_level_loss: bool = True
    """Mean over tokens; False: over rows with tokens, of the row's mean."""
    dp_size: int = Field(1, ge=1)
    """Given: data-parallel ranks, whose gradients the engine averages; ignored without the count below."""
    batch_num_tokens: float | None = Field(None, gt=0)
    """Given: tokens of the whole batch (over accumulation steps); None: those of the micro-batch."""
    global_batch_size: float | None = Field(None, gt=0)
    """Given: rows of the whole batch (over accumulation steps); None: those of the micro-batch."""


class PenaltySettings(Settings):
    """`--algo.kl.*` of its command line, as `training_step` uses them (openrlhf/trainer/ray/ppo_actor.py, 0.11.2)."""

    use_loss: bool = False
    """Add the penalty to the loss; False: it is part of the rewards."""
    init_coef: float = Field(0.01, ge=0)
    """Its weight, as the controller has it in the step."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator."""
    unbiased_gradient: bool = False
    """Take the gradient of k2, weighed by policy / old, for any estimate."""


class PolicySettings(AggregateSettings):
    """`PolicyLoss` (the same file), and the penalties that the trainer adds to it."""

    kl: PenaltySettings = PenaltySettings()
    """The KL penalty of the trainer."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus of the trainer; None: none."""

    clip_eps_low: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    clip_eps_high: float = Field(0.2, ge=0)
    """Length of the clip above 1."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a negative advantage has no gradient; None: none."""
    policy_loss_type: Literal["ppo", "gspo"] = "ppo"
    """Ratio of tokens, or the geometric mean of a row's; gspo is always a mean over rows."""
    is_correction_level: Literal["off", "token", "seq"] = "off"
    """Unit of the correction for the sampler: each token, or a row by its mean; off: none. gspo: a ratio against the
    sampler, for either."""
    is_correction_mode: Literal["mask", "clip"] = "mask"
    """Units outside the bounds: drop them, others keep the weight old / sampler of each token; or clip the weight."""
    is_correction_gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """Statistic that is bounded: the weight itself (of a row: the geometric mean), the divergence from the sampler
    between this token and any other one, or the distance of its two probabilities."""
    is_correction_threshold: tuple[float, float] = (0.5, 5.0)
    """Bounds of the statistic; one number on its command line is the upper one, above 0."""

    @model_validator(mode="before")
    @classmethod
    def _one_bound_is_the_upper_one(cls, value: Any) -> Any:
        given = value.get("is_correction_threshold") if isinstance(value, Mapping) else None
        if isinstance(given, list | tuple) and len(given) == 1:
            return {**value, "is_correction_threshold": (0.0, *given)}
        return value

    @model_validator(mode="after")
    def _correction_has_a_meaning(self) -> PolicySettings:
        divergence = self.is_correction_gating != "ratio"
        if self.is_correction_mode == "clip" and (self.is_correction_level == "seq" or divergence):
            raise ValueError("is_correction_mode clip needs is_correction_level token and is_correction_gating ratio")
        if divergence and self.is_correction_level != "off" and self.is_correction_threshold[0] > 0:
            raise ValueError(f"is_correction_gating {self.is_correction_gating} takes an upper bound only: (0, bound)")
        return self


class ValueSettings(AggregateSettings):
    """`ValueLoss` (the same file): half the squared error."""

    clip_eps: float | None = Field(None, gt=0)
    """Greatest distance of a value from the old one; None: any."""


class DPOSettings(Settings):
    """`DPOLoss` (the same file), on sums of log-probabilities."""

    beta: float = 0.1
    """Inverse temperature of the implied reward."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that the two completions of a preference are swapped; ipo ignores it."""
    ipo: bool = False
    """The squared distance of the margin from 1 / (2 beta)."""


class KLSettings(Settings):
    """`compute_approx_kl` (openrlhf/models/utils.py, 0.11.2)."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator."""
    output_clamp: float | None = Field(OUTPUT_CLAMP, gt=0)
    """Bound of the estimate; 10 there, always."""
    unbiased_gradient: bool = False
    """Take the gradient of k2 for any estimate; importance weights of an older policy are not replayed."""


class RewardSettings(Settings):
    """`compute_reward` (the same file)."""

    kl_coef: float = 0.0
    """Weight of the KL that is taken off; below 0 it is 0."""
    reward_clip_range: tuple[float, float] | None = None
    """Bounds of a row's reward."""
