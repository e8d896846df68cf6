"""Options of verl-project/verl, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.systems.registry import Settings
from workbench.systems.verl.correction import RolloutCorrection

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


LossMode = Literal[
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
    "reinforce",
]


BY_DOCUMENT = ("sapo",)
"""Losses that are averaged by seq-mean-token-mean, for any loss_agg_mode."""


class PolicyLoss(Settings):
    """Choice of the policy loss, and options of single losses (`PolicyLossConfig`, 1dda039b)."""

    loss_mode: LossMode = "vanilla"
    """Name in the registry; "reinforce" is the function that bypass_mode calls."""
    clip_cov_ratio: float | None = Field(0.0002, gt=0)
    """clip_cov: share of tokens that may be selected."""
    clip_cov_lb: float | None = 1.0
    """clip_cov: lower end of the band of covariances."""
    clip_cov_ub: float | None = 5.0
    """clip_cov: upper end of it."""
    kl_cov_ratio: float | None = Field(0.0002, gt=0)
    """kl_cov: share of tokens that is penalised."""
    ppo_kl_coef: float | None = Field(0.1, ge=0)
    """kl_cov: weight of the penalty; None: 1."""
    dro_beta: float | None = None
    """dro: strength of the pull; has no default."""
    rollout_correction: RolloutCorrection | None = None
    """bypass_mode: computed on the live policy inside the loss."""


class GlobalBatchInfo(Settings):
    """Counts of the whole mini-batch that a micro-batch is given."""

    dp_size: int = Field(1, ge=1)
    """Data-parallel ranks, whose gradients are averaged."""
    batch_num_tokens: float | None = Field(None, gt=0)
    """Trained tokens on all of them."""
    global_batch_size: float | None = Field(None, gt=0)
    """Sequences on all of them."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """seq-mean-token-sum-norm: divisor of a sequence's sum."""


class ActorSettings(Settings):
    """The actor's loss (`ActorConfig`, 1dda039b)."""

    clip_ratio: float = Field(0.2, ge=0)
    """Clip length where the two below are None."""
    clip_ratio_low: float | None = Field(0.2, ge=0)
    """Length of the clip below 1; dppo: greatest move of a token down; geo_mean: of the log ratio."""
    clip_ratio_high: float | None = Field(0.2, ge=0)
    """Length of the clip above 1; dppo: greatest move of a token up; geo_mean: of the log ratio."""
    clip_ratio_c: float = 3.0
    """vanilla: dual clip; dppo: cap of the ratio."""
    tau_pos: float = Field(1.0, gt=0)
    """sapo: steepness where the advantage is positive."""
    tau_neg: float = Field(1.05, gt=0)
    """sapo: steepness elsewhere."""
    loss_agg_mode: AggMode = "token-mean"
    """Reduction of per-token losses to one number."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """seq-mean-token-sum-norm: divisor of a sequence's sum; None: the padded width of the micro-batch."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL penalty against the reference."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Its weight."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3); a trailing "+" keeps the value and takes the gradient of
    k2."""
    policy_loss: PolicyLoss = PolicyLoss()
    """Policy loss and its own options."""
    rollout_correction: RolloutCorrection | None = None
    """The trainer's (`algorithm.rollout_correction`): computed once on the old policy, before the update."""
    global_batch_info: GlobalBatchInfo = GlobalBatchInfo()
    """Given: counts of the whole mini-batch."""
    rollout_is_weights: bool = False
    """Given: importance weights come with the batch."""


class AggregationSettings(GlobalBatchInfo):
    """`agg_loss` (1dda039b)."""

    loss_agg_mode: AggMode = "token-mean"
    """Reduction of per-token values to one number."""


class KLSettings(AggregationSettings):
    """`kl_penalty` and `agg_loss` (1dda039b)."""

    kl_penalty: str = "low_var_kl"
    """See `ActorSettings.kl_loss_type`."""


class ValueSettings(AggregationSettings):
    """`compute_value_loss` (1dda039b)."""

    cliprange_value: float = Field(0.5, gt=0)
    """Greatest move of a value from the old one, beyond which the error no longer falls."""
