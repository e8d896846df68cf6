"""Settings of the loss on preference pairs. Formula: `workbench.losses.preference`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from workbench.specs.losses.base import Surrogate


class DPO(Surrogate):
    """Direct preference optimisation."""

    needs_pairs: ClassVar[bool] = True
    reads_advantages: ClassVar[bool] = False

    kind: Literal["dpo"] = "dpo"
    beta: float = Field(0.1, ge=0)
    """Inverse temperature of the implied reward."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a recorded preference is reversed."""
