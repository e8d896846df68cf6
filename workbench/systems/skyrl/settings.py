"""Options of NovaSky-AI/SkyRL, by its names and with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from workbench.systems.registry import Settings, WholeSettings

LOG_CLAMP = 20.0
"""Bound of a log ratio (`safe_exp_delta`), and of d in its k3."""
OUTPUT_CLAMP = 10.0
"""Bound of its k3 estimate (`compute_approx_kl`)."""
GSPO_CAP = 10.0
"""Upper bound of the log of gspo's ratio."""

LossReduction = Literal["token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
PolicyLossType = Literal[
    "regular", "dual_clip", "gspo", "clip_cov", "kl_cov", "cispo", "sapo", "rollout_is", "dppo", "importance_sampling"
]

_BY_REASON: Mapping[str, str] = {
    "they make the advantages, which a loss takes as they are": """
        advantage_estimator grpo_norm_by_std lambd gamma kl_ctrl
    """,
    "they choose the rows, and the tokens that train": "zero_variance_filter zero_variance_filter_tol dynamic_sampling",
    "they are about the critic": "value_head_prefix value_clip",
    "it divides the logits of which the loss takes log-probabilities": "temperature",
    "they are options of losses that are refused": "clip_cov kl_cov",
}
WITHOUT_EFFECT: Mapping[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
"""Option of `AlgorithmConfig` -> the reason why it does not change the loss of given log-probabilities."""


class SAPOSettings(Settings):
    """`SAPOConfig` (skyrl/train/config/config.py, 0.3.0)."""

    tau_pos: float = Field(1.0, gt=0)
    """Steepness where the advantage is positive."""
    tau_neg: float = Field(1.05, gt=0)
    """Steepness elsewhere."""


class CISPOSettings(Settings):
    """`CISPOConfig` (the same file)."""

    cispo_eps_clip_low: float = Field(0.0, ge=0)
    """Distance from 1 down to the lower bound of the ratio."""
    cispo_eps_clip_high: float = Field(5.0, ge=0)
    """Distance from 1 up to the upper bound."""


class DPPOSettings(Settings):
    """`DPPOConfig` (the same file)."""

    dppo_type: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """The divergence of the token's probability from the sampler's."""
    delta_low: float = Field(0.2, ge=0)
    """Greatest divergence where the advantage is negative."""
    delta_high: float = Field(0.2, ge=0)
    """Greatest divergence where it is positive."""


class CorrectionSettings(Settings):
    """`OffPolicyCorrectionConfig` (the same file): all of it starts from old / sampler."""

    tis_ratio_type: Literal["token", "sequence"] | None = None
    """Weight by the token's ratio, or by the product of the row's; None: no weight."""
    token_tis_ratio_clip_high: float = Field(2.0, gt=0)
    """Upper bound of a token's weight."""
    sequence_tis_ratio_clip_high: float = Field(5.0, gt=0)
    """Upper bound of a row's weight."""
    sequence_mask_metric: Literal["product", "geometric"] | None = None
    """Drop rows by the product of their ratios, or by its geometric mean; None: none."""
    geo_mask_high: float = 1.01
    """Greatest geometric mean that is kept."""
    geo_mask_low: float = 0.99
    """Smallest geometric mean that is kept."""
    product_mask_high: float = 2.0
    """Greatest product that is kept."""
    product_mask_low: float = 0.5
    """Smallest product that is kept."""
    outlier_token_is_threshold_low: float | None = None
    """Drop a row with a token whose ratio is below this."""
    outlier_token_is_threshold_high: float | None = None
    """Drop a row with a token whose ratio is above this."""
    token_mask_is_threshold_low: float | None = None
    """Drop tokens whose ratio is below this; acts only with the upper one."""
    token_mask_is_threshold_high: float | None = None
    """Drop tokens whose ratio is above this; acts only with the lower one."""

    @property
    def masks_tokens(self) -> bool:
        """True if single tokens are dropped."""
        return None not in (self.token_mask_is_threshold_low, self.token_mask_is_threshold_high)


class AlgorithmSettings(WholeSettings):
    """`AlgorithmConfig`, `trainer.algorithm` (the same file)."""

    policy_loss_type: PolicyLossType = "regular"
    """Name in the registry of policy losses."""
    loss_reduction: LossReduction = "token_mean"
    """Divisor of the policy term, counted over the whole mini-batch; token_mean_legacy: over each micro-batch."""
    max_seq_len: float | None = Field(None, gt=0)
    """seq_mean_token_sum_norm: the constant length."""
    eps_clip_low: float = Field(0.2, ge=0)
    """Distance from 1 down to the lower clip bound."""
    eps_clip_high: float = Field(0.2, ge=0)
    """Distance from 1 up to the upper clip bound."""
    clip_ratio_c: float = 3.0
    """dual_clip: ratio above which a negative advantage has no gradient."""
    use_kl_loss: bool = True
    """Add the KL penalty to the loss."""
    use_kl_in_reward: bool = False
    """Subtract it from the reward instead."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Its weight."""
    kl_estimator_type: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Its estimator."""
    use_entropy_loss: bool = False
    """Subtract an entropy bonus."""
    entropy_loss_coef: float = 0.01
    """Its weight."""
    advantage_batch_normalize: bool = False
    """Whiten advantages over the batch before the loss."""
    use_tis: bool = False
    """Deprecated: `off_policy_correction.tis_ratio_type` token."""
    tis_imp_ratio_cap: float = -1.0
    """Deprecated: `off_policy_correction.token_tis_ratio_clip_high`, with use_tis."""
    off_policy_correction: CorrectionSettings = CorrectionSettings()
    """The correction for the mismatch of sampler and trainer."""
    sapo: SAPOSettings = SAPOSettings()
    """Options of sapo."""
    cispo: CISPOSettings = CISPOSettings()
    """Options of cispo."""
    dppo: DPPOSettings = DPPOSettings()
    """Options of dppo."""
    without_effect: ClassVar[Mapping[str, str]] = WITHOUT_EFFECT

    @model_validator(mode="after")
    def _one_place_of_the_penalty(self) -> AlgorithmSettings:
        if self.use_kl_loss and self.use_kl_in_reward:
            raise ValueError("use_kl_loss and use_kl_in_reward exclude each other")
        return self
