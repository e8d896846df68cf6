"""Settings of the KL penalty. Formulas: `workbench.losses.kl`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from workbench.specs.losses.base import Settings

KLEstimator = Literal["k1", "k2", "k3", "abs", "squared"]


class KLSpec(Settings):
    """A KL penalty, estimated on the sampled token."""

    coefficient: float = Field(0.0, ge=0)
    """Weight of the penalty; 0: none."""
    estimator: KLEstimator = "k3"
    """With d = other - policy: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d, abs = |d|, squared = d^2 (no half)."""
    against: Literal["ref", "sampler", "old"] = "ref"
    """The other policy."""
    gradient: Literal["path", "score", "straight_through"] = "path"
    """path: of the estimate itself; score: including the gradient of sampling (that of an expectation under the
    policy); straight_through: that of k2, for any estimate."""
    importance: Literal["none", "old", "sampler"] = "none"
    """Multiply the estimate by policy / old or policy / sampler, because that policy drew the tokens."""
    importance_level: Literal["token", "document"] = "token"
    """That ratio is the token's own, or the geometric mean over the trained tokens of its document."""
    input_clamp: float | None = Field(None, gt=0)
    """Bound of |d|; a token beyond it has no gradient (straight_through keeps its own). None: none."""
    output_clamp: float | None = Field(None, gt=0)
    """Bound of the weighted estimate's absolute value; a token beyond it has no gradient (straight_through keeps its
    own). None: none."""
    placement: Literal["loss", "reward"] = "loss"
    """The penalty is a term of the loss, or is subtracted from the reward when advantages are computed."""

    @model_validator(mode="after")
    def _check_settings(self) -> KLSpec:
        if self.placement == "reward" and (self.gradient != "path" or self.importance != "none"):
            raise ValueError("gradient and importance are about a term of the loss; in the reward the penalty is data")
        if self.importance_level == "document" and self.importance == "none":
            raise ValueError("importance_level is about the ratio that importance names (old, sampler)")
        if self.placement == "reward" and self.against != "ref":
            raise ValueError(
                "in the reward the penalty compares the old policy with ref; the other policies are where "
                "the tokens come from"
            )
        return self
