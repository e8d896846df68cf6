"""Settings of surrogates with a soft bound. Formulas: `workbench.losses.soft`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from workbench.specs.losses.base import Anchored


class SAPO(Anchored):
    """The ratio through a sigmoid gate."""

    kind: Literal["sapo"] = "sapo"
    level: Literal["token", "document", "segment"] = "token"
    """Unit of the ratio: the token, or the geometric mean over the document or over each unbroken run of its trained
    tokens."""
    advantage_level: Literal["token", "document"] = "token"
    """Each token keeps its advantage, or takes the mean over its document."""
    tau_positive: float = Field(1.0, gt=0)
    """Steepness where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness elsewhere."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of |log ratio|; a token beyond it has no gradient. None: none."""


class DRO(Anchored):
    """The log-probability with a quadratic pull to the anchor."""

    kind: Literal["dro"] = "dro"
    beta: float = Field(0.1, ge=0)
    """Strength of the quadratic pull to the anchor."""
