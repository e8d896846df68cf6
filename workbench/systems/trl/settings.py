"""Options of huggingface/trl, by its names and with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from workbench.systems.registry import Settings, WholeSettings
from workbench.systems.trl.options import WITHOUT_EFFECT

COUNTED = ("dapo", "cispo", "vespo")
"""Loss types that are divided by ``num_items_in_batch``."""


LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo"]


Mode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class GRPOFamily(Settings):
    """Options that TRL's trainer and Liger's kernel have in common."""

    loss_type: LossType = "dapo"
    """Surrogate and denominator."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of tokens, or the geometric mean over a row (Liger: not for cispo, sapo and vespo)."""
    delta: float | None = Field(None, gt=0)
    """Upper bound of the ratio in the unclipped branch."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """sapo: steepness where the advantage is positive."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """sapo: steepness elsewhere."""
    vespo_k_pos: float = Field(2.0, ge=0)
    """vespo: power, advantages that are not negative."""
    vespo_lambda_pos: float = Field(3.0, ge=0)
    """vespo: decay, advantages that are not negative; at least 1e-4."""
    vespo_k_neg: float = Field(3.0, ge=0)
    """vespo: power, negative advantages."""
    vespo_lambda_neg: float = Field(2.0, ge=0)
    """vespo: decay, negative advantages; at least 1e-4."""
    vespo: dict[Literal["k_pos", "lambda_pos", "k_neg", "lambda_neg"], float] | None = None
    """The four together; they override the single options."""
    temperature: float = Field(1.0, gt=0)
    """Divides logits."""
    num_items_in_batch: float | None = Field(None, ge=0)
    """Given: trained tokens of the generation batch, over all processes."""


class TRLSettings(GRPOFamily, WholeSettings):
    """`GRPOConfig`, most of which leaves the loss as it is, and arguments of a call of `_compute_loss` (TRL 1.16.0)."""

    epsilon: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    epsilon_low: float | None = Field(None, ge=0)
    """`epsilon`, as the trainer's attribute is called."""
    epsilon_high: float | None = Field(None, ge=0)
    """Length of the clip above 1, None: as below; cispo: the bound itself."""
    beta: float = Field(0.0, ge=0)
    """Coefficient of the KL penalty against the reference (k3)."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the ratio, including its gradient."""
    off_policy_mask_threshold: float | None = None
    """Drop rows with negative advantage whose mean of (sampler - policy) is above this."""
    top_entropy_quantile: float = Field(1.0, ge=0, le=1)
    """Share of tokens, those of highest entropy, that policy term and entropy bonus act on."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    use_adaptive_entropy: bool = False
    """Let a controller change ``entropy_coef`` from step to step."""
    use_vllm: bool = False
    """vLLM sampled, and its log-probabilities are there."""
    vllm_importance_sampling_correction: bool = True
    """With vLLM: weight by old / sampler."""
    vllm_importance_sampling_mode: Mode = "sequence_mask"
    """Weights of tokens or of whole rows (products), bounded or zeroed outside the bounds."""
    vllm_importance_sampling_clip_min: float | None = Field(None, ge=0)
    """Lower bound of the weight."""
    vllm_importance_sampling_clip_max: float | None = Field(3.0, gt=0)
    """Upper bound of the weight."""
    vllm_importance_sampling_cap: float | None = Field(None, gt=0)
    """The upper bound by its former name; takes precedence."""
    max_completion_length: int | None = Field(512, gt=0)
    """dr_grpo: the constant length."""
    mask_truncated_completions: bool = False
    """Truncated completions come with a mask of zeros: a property of the batch."""
    gradient_accumulation_steps: int = Field(1, gt=0)
    """Micro-batches of an optimizer step."""
    steps_per_generation: int | None = Field(None, gt=0)
    """Micro-batches of a generation batch; None: ``gradient_accumulation_steps``."""
    num_iterations: int = Field(1, gt=0)
    """Times that a generation batch is trained on; decides if old log-probabilities are kept."""
    vllm_is: Literal["token", "sequence", "seq"] | Mode | None = None
    """Given: ready-made weights came with the batch, one per token or one per row."""
    router_aux_loss_coef: float | None = Field(None, ge=0)
    """Weight of the load-balancing loss of a mixture of experts, a term of its own; None: the config's of the model."""
    cast_lm_head_to_fp32: bool = False
    """Compute logits in float32."""
    use_liger_kernel: bool = False
    """Take the loss of Liger's kernel."""
    without_effect: ClassVar[Mapping[str, str]] = WITHOUT_EFFECT


class ISSettings(Settings):
    """The correction for vLLM alone, in `_generate_and_score_completions`."""

    mode: Mode = "sequence_mask"
    """``vllm_importance_sampling_mode``."""
    clip_min: float | None = Field(None, ge=0)
    """``vllm_importance_sampling_clip_min``."""
    clip_max: float | None = Field(3.0, gt=0)
    """``vllm_importance_sampling_clip_max``."""


class AdvantageSettings(Settings):
    """Advantages, in `_generate_and_score_completions`."""

    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Add weighted rewards and normalise the sum, or normalise each and then the sum."""
    scale_rewards: Literal["group", "batch", "none"] | bool = "group"
    """Population of the standard deviation that divides; no effect under normalize_then_sum."""
    num_generations: int = Field(8, gt=0)
    """Completions per prompt; a group is as many consecutive rows."""
    eps: float = Field(1e-4, ge=0)
    """Added to a standard deviation; a constant in TRL."""
