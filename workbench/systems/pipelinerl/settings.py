"""Options of ServiceNow/PipelineRL, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.systems.registry import Settings


class PipelineRLSettings(Settings):
    """`RLConfig`, and arguments of `rl_step` (pipelinerl/finetune/rl/__init__.py, 58d39345)."""

    policy_loss: Literal["ppo", "reinforce", "gspo"] = "ppo"
    """Surrogate."""
    use_advantages: bool = True
    """Multiply it by advantages, not by rewards; gspo always takes advantages."""
    epsilon_low: float = Field(0.2, ge=0)
    """Length of the clip below 1; reinforce ignores it."""
    epsilon_high: float = Field(0.2, ge=0)
    """Length of the clip above 1."""
    batch_size: float = Field(0, ge=0)
    """Documents that every sum is divided by; 0, the default, divides by zero there and stands for the documents of the
    step here."""
    reward_minus_kl_coef: float = 0.0
    """Has no effect."""
    kl_coef: float = Field(0.1, ge=0)
    """Coefficient of the KL penalty at the first step."""
    final_kl_coef: float = Field(0.1, ge=0)
    """At the last step; linear between."""
    entropy_bonus: float = 0.0
    """Coefficient of the entropy bonus at the first step."""
    final_entropy_bonus: float = 0.0
    """At the last step; linear between."""
    relu_log_p_weights: bool = False
    """Give tokens with a negative signal no loss."""
    clamp_log_ratio_ref_new_value: float = Field(10, gt=0)
    """Bound of the log ratio inside the KL estimate."""
    divide_advantage_by_std: bool = True
    """Applies when advantages are computed."""
    overlong_filtering: bool = False
    """Truncated documents get weight 0, and stay in every count."""
    group_normalization: bool = False
    """Divide by the mean number of tokens of the group's rollouts, in place of batch_size."""
    temperature: float = Field(1.0, gt=0)
    """Divides logits."""
    filter_zero_advantage_groups: bool = False
    """Applies when batches are built."""
    value_loss_coef: float = Field(0.0, ge=0)
    """Coefficient of a critic's loss; only a model with a value head has one."""
    current_step: int = Field(0, ge=0)
    """Given: current step of the two schedules."""
    max_step: int = Field(1, gt=0)
    """Given: their last step."""
    packed: bool = True
    """Given: documents are packed; gspo needs it."""

    @property
    def kl_now(self) -> float:
        """The KL coefficient at this step."""
        return self._now(self.kl_coef, self.final_kl_coef)

    @property
    def entropy_now(self) -> float:
        """The entropy coefficient at this step."""
        return self._now(self.entropy_bonus, self.final_entropy_bonus)

    def _now(self, first: float, last: float) -> float:
        return first + (last - first) * self.current_step / self.max_step


class AdvantageSettings(Settings):
    """`populate_rl_data` (pipelinerl/finetune/rl/__init__.py, 58d39345)."""

    divide_advantage_by_std: bool = True
    """Divide by the group's standard deviation."""
    eps: float = Field(1e-4, ge=0)
    """Added to it; 1e-4 in the code."""
