"""Options of the GRPO step of NousResearch/torchtitan, by its names and with its defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from workbench.systems.registry import Settings

ROWS: Final = "mean over rows of per-row token mean"


ESTIMATORS = {"k3": "k3", "mse": "k2", "abs": "abs"}
"""KL estimator of the system -> estimator of `KLSpec`."""


class RolloutISSettings(Settings):
    """Importance weights of the trainer against the sampler (torchtitan/grpo/importance_sampling.py, 94d6abd4)."""

    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    """Scope over which the log ratio is summed, or averaged."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """Bound weights from above, or zero those outside both bounds."""
    rollout_is_threshold: float | None = Field(None, gt=0)
    """Upper bound; None: no weights."""
    rollout_is_threshold_lower: float | None = Field(None, ge=0)
    """Lower bound of mode mask; None: 1 / upper."""
    rollout_is_veto_threshold: float | None = Field(1e-4, gt=0)
    """Rows with a token whose ratio is below this get weight 0; None: none do."""

    @property
    def lower(self) -> float:
        """The lower bound of mode mask."""
        if self.rollout_is_threshold_lower is not None:
            return self.rollout_is_threshold_lower
        assert self.rollout_is_threshold is not None, "without an upper bound there are no weights"
        return 1 / self.rollout_is_threshold

    @model_validator(mode="after")
    def _bounds_in_order(self) -> RolloutISSettings:
        upper = self.rollout_is_threshold
        if upper is not None and self.rollout_is_mode == "mask" and self.lower > upper:
            raise ValueError(
                "no weight is at least rollout_is_threshold_lower (1 / rollout_is_threshold if that is "
                "not given) and at most rollout_is_threshold"
            )
        return self


class NousSettings(Settings):
    """Options of the step (`job_config.grpo` in torchtitan/grpo/grpo_step.py, 94d6abd4).

    Its defaults are in a file that was not read; here nothing acts but a clip of 0.2.
    """

    reduction: Literal["mean over rows of per-row token mean", "token mean"] = ROWS
    """Reduction of the matrix of losses by the trainer."""
    policy_ratio_type: Literal["token", "sequence"] = "token"
    """Ratio of tokens, or of rows."""
    clip_ratio_lower_bound: float = Field(0.2, ge=0)
    """Length of the clip below 1, for rewards that are not positive."""
    clip_ratio_upper_bound: float = Field(0.2, ge=0)
    """Length of the clip above 1, for positive rewards."""
    use_ref_model: bool = False
    """A KL penalty."""
    kl_estimator_type: Literal["k3", "mse", "abs"] = "k3"
    """Its estimator; mse is half the squared log ratio."""
    kl_beta: float = 0.0
    """Its coefficient; one that is not positive counts as 0."""
    entropy_loss_weight: float = 0.0
    """Coefficient of the entropy bonus; one that is not positive counts as 0."""
    logit_loss_weight: float = 0.0
    """Its square multiplies the mean squared logit; one that is not positive counts as 0."""
    onpolicy_logp_threshold: float = 0.0
    """Tokens less likely than this are left out of metrics, means over a row, and importance weights; 0 and 1: none.
    A probability, or, if negative, its log."""
    rollout_is: RolloutISSettings | None = None
    """Importance weights against the sampler; their options may also be given one by one."""

    @model_validator(mode="before")
    @classmethod
    def _weights_one_by_one(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        loose = {name: value[name] for name in RolloutISSettings.model_fields if name in value}
        others = {name: option for name, option in value.items() if name not in loose}
        return {**others, "rollout_is": {**(others.get("rollout_is") or {}), **loose}} if loose else others

    @property
    def logprob_floor(self) -> float | None:
        """The threshold as a log-probability; None: there is none."""
        threshold = self.onpolicy_logp_threshold
        if threshold in (0.0, 1.0):
            return None
        return math.log(threshold) if 0 < threshold < 1 else threshold


class MaskedSettings(Settings):
    """`masked_mean` and `masked_sum` (torchtitan/grpo/utils.py, 94d6abd4)."""

    per_seq: bool = False
    """By row; the mean is then a mean over rows."""


class RewardNormSettings(Settings):
    """`distributed_reward_norm` (RUFFY-369/torchtitan a79e8b5d)."""

    ranks: int = Field(1, ge=1)
    """Several ranks take the deviation of the population; here it is always that of a sample."""
    eps: float = Field(1e-8, ge=0)
    """Added to the deviation."""
