"""Options of OpenRLHF/OpenRLHF, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workbench.systems.registry import Settings

LOG_CLAMP = 20.0
"""Bound of a token's log ratio."""


OUTPUT_CLAMP = 10.0
"""Bound of a KL estimate."""


class AggregateSettings(Settings):
    """`aggregate_loss` (openrlhf/models/loss.py, 3c3be623)."""

    token_level_loss: bool = True
    """Mean over tokens; False: over rows with tokens, of the row's mean."""
    dp_size: int = Field(1, ge=1)
    """Given: data-parallel ranks, whose gradients the engine averages; ignored without the count below."""
    batch_num_tokens: float | None = Field(None, gt=0)
    """Given: tokens of the whole batch (over accumulation steps); None: those of the micro-batch."""
    global_batch_size: float | None = Field(None, gt=0)
    """Given: rows of the whole batch (over accumulation steps); None: those of the micro-batch."""


class PolicySettings(AggregateSettings):
    """`PolicyLoss` (the same file)."""

    clip_eps_low: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    clip_eps_high: float = Field(0.2, ge=0)
    """Length of the clip above 1."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a negative advantage has no gradient; None: none."""
    policy_loss_type: Literal["ppo", "gspo"] = "ppo"
    """Ratio of tokens, or the geometric mean of a row's; gspo is always a mean over rows."""
    enable_vllm_is_correction: bool = False
    """Correct for the sampler: a weight old / sampler, or for gspo a ratio against the sampler."""
    vllm_is_truncated_threshold: tuple[float, float] | None = None
    """Bounds of the weight, or of a row's geometric mean of weights."""
    vllm_is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """Handling of weights outside: truncate; zero; or drop rows by their geometric mean."""

    @model_validator(mode="after")
    def _correction_has_bounds(self) -> PolicySettings:
        needed = self.enable_vllm_is_correction and self.policy_loss_type == "ppo"
        if needed and self.vllm_is_truncated_threshold is None:
            raise ValueError("enable_vllm_is_correction needs vllm_is_truncated_threshold, two bounds")
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
    """`compute_approx_kl` (openrlhf/models/utils.py, 3c3be623)."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator."""
    output_clamp: float | None = Field(OUTPUT_CLAMP, gt=0)
    """Bound of the estimate; 10 there, always."""


class RewardSettings(Settings):
    """`compute_reward` (the same file)."""

    kl_coef: float = 0.0
    """Weight of the KL that is taken off; below 0 it is 0."""
    reward_clip_range: tuple[float, float] | None = None
    """Bounds of a row's reward."""
