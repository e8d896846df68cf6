"""Options of THUDM/slime, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workbench.systems.registry import Settings


class SlimeSettings(Settings):
    """Arguments of slime's policy loss (slime/utils/arguments.py, 624b824a)."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    """gspo: the ratio is one of a sample; cispo: it is truncated, not clipped. The others share one loss."""
    eps_clip: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    eps_clip_high: float | None = Field(None, ge=0)
    """Length of the clip above 1; None: eps_clip."""
    eps_clip_c: float | None = Field(None, gt=1)
    """Dual clip: bound of the ratio for negative advantages; None: none."""
    use_opsm: bool = False
    """Off-policy sequence masking."""
    opsm_delta: float | None = 1e-4
    """Its threshold."""
    use_kl_loss: bool = False
    """A KL penalty in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] | None = "k1"
    """Its estimator; low_var_kl is k3 within +-10."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Its coefficient."""
    use_unbiased_kl: bool = False
    """Multiply the estimate by policy / old, with its gradient."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    use_tis: bool = False
    """Truncated importance sampling of the train policy against the rollout's."""
    tis_clip: float = Field(2.0, gt=0)
    """Its upper bound."""
    tis_clip_low: float = Field(0.0, ge=0)
    """Its lower bound."""
    custom_tis_function_path: str | None = None
    """User function in place of truncation."""
    custom_pg_loss_reducer_function_path: str | None = None
    """User function in place of the mean."""
    use_rollout_logprobs: bool = False
    """Take the rollout's log-probabilities for the old policy's."""
    get_mismatch_metrics: bool = False
    """Log the metrics of use_tis without it; no effect on the loss."""
    calculate_per_token_loss: bool = False
    """Divide by tokens of the step, in place of a mean over samples of the sample's token mean."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> SlimeSettings:
        if self.tis_clip_low > self.tis_clip:
            raise ValueError("tis_clip_low is above tis_clip")
        return self


class LogprobSettings(Settings):
    """`_VocabParallelLogProbEntropy` (slime/utils/ppo_utils.py, 624b824a)."""

    keep_mask: bool = False
    """Log-probabilities over the sampler's truncated support; the entropy stays that of the whole vocabulary."""
    entropy_grad: bool = True
    """The entropy has a gradient."""


class GAESettings(Settings):
    """`vanilla_gae` (slime/utils/ppo_utils.py, 624b824a); `chunked_gae` is the same number."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda."""
