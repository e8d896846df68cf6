"""Options of ServiceNow/Fast-LLM, by its names and with its defaults."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.systems.registry import Settings


class FastLLMSettings(Settings):
    """One policy-gradient loss of a head (`LanguageModelGRPOLossConfig`, `LanguageModelGSPOLossConfig`, 7d61a1ba)."""

    type: Literal["grpo", "gspo"] = "grpo"
    """Ratio of tokens, or of documents."""
    epsilon_low: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    epsilon_high: float = Field(0.2, ge=0)
    """Length of the clip above 1."""
    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies logits: 1 / temperature, on top of the model's own."""
    weight: float = Field(1.0, ge=0)
    """Multiplies the loss and its gradient."""
    metrics: Literal["none", "basic", "auto"] = "auto"
    """Metrics that are logged; no effect on the loss."""
    use_triton: bool | None = None
    """Kernel of the loss; affects rounding only."""
    divisor: float | None = Field(None, gt=0)
    """Given: labels of the whole batch (grpo), or documents of the whole batch (gspo)."""
    num_documents_in_batch: float | None = Field(None, gt=0)
    """Given: documents of the whole batch, which metrics are divided by."""
    num_segments: int | None = Field(None, ge=0)
    """Given: documents of this data-parallel rank."""
    grad_output: float | None = None
    """Given: the value that the engine back-propagates in place of 1 (a loss scale)."""


class EntropySettings(Settings):
    """`torch_entropy_loss_forward_backward` (functional/entropy_loss.py, 7d61a1ba)."""

    target_format: Literal["labels", "logits", "probabilities"] = "labels"
    """Format of the target."""
    entropy_loss_type: Literal["cross_entropy", "forward_kl", "reverse_kl"] = "cross_entropy"
    """Divergence."""
    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies logits, and target logits."""
    temperature: float = Field(1.0, gt=0)
    """Divides target logits."""
    grad_output: float | None = None
    """Given: the value that is back-propagated in place of 1."""


class DPOSettings(Settings):
    """`dpo_loss` (layers/language_model/loss/dpo.py, 7d61a1ba): one sigmoid of the whole batch."""

    beta: float = Field(1.0, gt=0)
    """Inverse temperature of the implied reward."""
    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies the policy's logits, not those of the reference."""
    chosen_spans: list[list[tuple[int, int]]]
    """Given: [begin, end) of chosen completions, one list per row."""
    rejected_spans: list[list[tuple[int, int]]]
    """Given: [begin, end) of rejected completions, one list per row."""
    grad_output: float | None = None
    """Given: the value that is back-propagated in place of 1."""


class ZLossSettings(Settings):
    """`z_loss` (layers/language_model/loss/z_loss.py, 7d61a1ba)."""

    logits_scale_factor: float = Field(1.0, gt=0)
    """Multiplies logits."""
    grad_output: float | None = None
    """Given: the value that is back-propagated in place of 1."""
