"""Settings of the clipped surrogate. Formula: `workbench.losses.clipped`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.specs.losses.base import Anchored, ClipHigh, ClipLow


class PPO(Anchored):
    """A token's ratio, clipped from both sides."""

    kind: Literal["ppo"] = "ppo"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token with negative advantage loses its gradient; None: never."""
    delta: float | None = Field(None, gt=0)
    """The two-sided bound: min(ratio, delta) in the unclipped branch; None: none."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of |log ratio|; a token beyond it has no gradient. None: none."""
