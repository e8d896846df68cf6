"""Settings of surrogates that select tokens by covariance. Formulas: `workbench.losses.covariance`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from workbench.specs.losses.base import LOCAL_STATISTICS, Anchored, ClipHigh, ClipLow, above


class ClipCov(Anchored):
    """The clipped surrogate without the tokens of high covariance."""

    breaks: ClassVar[tuple[str, ...]] = LOCAL_STATISTICS

    kind: Literal["clip_cov"] = "clip_cov"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    cov_fraction: float = Field(2e-4, ge=0, le=1)
    """Share of this micro-batch's tokens that is selected."""
    cov_low: float = 1.0
    """Only tokens whose covariance is above this are candidates."""
    cov_high: float = 5.0
    """Only tokens whose covariance is below this are candidates."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> ClipCov:
        if above(self.cov_low, self.cov_high):
            raise ValueError("cov_low is above cov_high: no token is between them")
        return self


class KLCov(Anchored):
    """The ratio, with a penalty on the tokens of highest covariance."""

    breaks: ClassVar[tuple[str, ...]] = LOCAL_STATISTICS

    kind: Literal["kl_cov"] = "kl_cov"
    cov_fraction: float = Field(2e-4, ge=0, le=1)
    """Share of this micro-batch's tokens that is selected."""
    cov_coefficient: float = Field(1.0, ge=0)
    """Weight of the penalty on selected tokens."""
