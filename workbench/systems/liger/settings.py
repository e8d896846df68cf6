"""Options of linkedin/Liger-Kernel, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workbench.systems.registry import Settings
from workbench.systems.trl.settings import GRPOFamily


class LigerSettings(GRPOFamily):
    """Options of `LigerFusedLinearGRPOLoss`, and arguments of one call (Liger-Kernel 0.8.5)."""

    epsilon_low: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    epsilon_high: float = Field(0.2, ge=0)
    """Length of the clip above 1; cispo: the bound itself."""
    beta: float = Field(0.04, ge=0)
    """Coefficient of the KL penalty against the reference (k3)."""
    use_ref_model: bool = True
    """The call has a reference; without one the penalty is of the policy against itself."""
    use_bias_correction_kl: bool = False
    """Multiply the KL estimate by the ratio, including its gradient."""
    max_completion_length: int | None = Field(None, gt=0)
    """dr_grpo: the constant length."""
    chunk_size: int = Field(1, gt=0)
    """Rows that are computed at a time; affects rounding only."""
    compiled: bool = True
    """Compile the loss; affects rounding only."""
    vllm_is: Literal["token", "sequence", "seq"] | None = None
    """Given: ready-made weights came with the batch, one per token or one per row."""

    @model_validator(mode="after")
    def _as_the_kernel_refuses(self) -> LigerSettings:
        if self.importance_sampling_level == "sequence" and self.loss_type in ("cispo", "sapo", "vespo"):
            raise ValueError(f"{self.loss_type} has no ratio of rows in Liger: importance_sampling_level is token")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("dr_grpo divides by max_completion_length, which is not set")
        return self


class DPOSettings(Settings):
    """Options of `LigerFusedLinearDPOLoss` (Liger-Kernel 0.8.5)."""

    loss_type: Literal[
        "sigmoid",
        "hinge",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
    ] = "sigmoid"
    """Loss of a pair."""
    beta: float = 0.1
    """Inverse temperature of the implied reward."""
    alpha: float = 1.0
    """Weight of the negative log-likelihood."""
    compute_nll_loss: bool = False
    """Add the mean negative log-likelihood of the tokens of chosen completions."""
    use_ref_model: bool = True
    """Take rewards against a reference."""
    average_log_prob: bool = False
    """Means over a completion's tokens in place of sums."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """exo_pair, robust: share of preferences that are swapped; no effect on the others, including sigmoid."""
    discopop_tau: float = Field(0.05, gt=0)
    """discopop: temperature of the modulation."""
    ignore_index: int = -100
    """Targets that do not train."""
    chunk_size: int = Field(1, gt=0)
    """Pairs that are computed at a time; affects rounding only."""
    compiled: bool = True
    """Compile the loss; affects rounding only."""
