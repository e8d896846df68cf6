"""Settings of a loss in a user's own file. The interface: `workbench.losses.own`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from workbench.specs.losses.base import Surrogate


class OwnLoss(Surrogate):
    """A function of a user's file, ``loss: {name: "my_losses.py:grpo", settings: {...}}``."""

    kind: Literal["own"] = "own"
    function: str = ""
    """FILE.py:NAME; a relative path begins at the project root. The file is executed, and is part of a run's
    identity."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    engine: Literal["sum", "mean"] | None = None
    """None: the function gives per-token terms, and the weights of `denominator` apply. sum or mean: it is a trainer's
    microbatch_loss(batch, outputs, totals), which divides by itself, and this is what the trainer's engine does to
    gradients over dp x cp."""
