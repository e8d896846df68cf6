"""Options of alibaba/ROLL, by its names and with its defaults."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from workbench.systems.registry import Settings

OUTPUT_CLAMP = 10.0
"""Bound of its k3 estimate (`compute_approx_kl`, roll/utils/functionals.py)."""


class ActorSettings(Settings):
    """Options of `ActorWorker.loss_func` (roll/configs/base_config.py and pipeline/rlvr/rlvr_config.py, 8eb27cc2)."""

    importance_sampling: Literal["token", "seq"] = "token"
    """Ratio of tokens, or the geometric mean of a row's."""
    pg_clip: float = Field(0.2, ge=0)
    """Distance from 1 to both clip bounds; the dual clip is at 1 + 2 pg_clip."""
    use_pg_clip_range: bool = False
    """Take the two distances below."""
    pg_clip_low: float = Field(0.2, ge=0)
    """Distance down to the lower clip bound."""
    pg_clip_high: float = Field(0.2, ge=0)
    """Distance up to the upper clip bound."""
    dual_clip_loss: bool = False
    """End the gradient of a negative advantage above the dual clip."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "seq-mean-token-mean"
    )
    """Reduction of per-token losses to one number."""
    use_kl_loss: bool = False
    """Add a KL penalty against the reference."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Its weight."""
    rl_loss_coef: float = 1.0
    """Multiplies policy term and KL penalty."""
    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus."""
    difficulty_loss_weight: bool = False
    """Weigh rows by their difficulty."""
    length_loss_weight: bool = False
    """Weigh rows by their length."""
    train_infer_correction: dict[str, Any] = Field(default_factory=dict)
    """Correction for the mismatch of sampler and trainer."""
