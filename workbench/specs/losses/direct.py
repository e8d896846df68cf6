"""Settings of surrogates that clip no gradient, and of supervised fine-tuning. Formulas: `workbench.losses.direct`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from workbench.specs.losses.base import Anchored, Surrogate, above


class ImportanceSampling(Anchored):
    """The ratio, without a clip."""

    kind: Literal["importance_sampling"] = "importance_sampling"


class Reinforce(Surrogate):
    """The log-probability, without a ratio."""

    kind: Literal["reinforce"] = "reinforce"


class GPG(Surrogate):
    """The log-probability over the share of documents with a signal."""

    kind: Literal["gpg"] = "gpg"


class OnPolicy(Surrogate):
    """The ratio of the policy to itself: 1, with a gradient."""

    kind: Literal["on_policy"] = "on_policy"


class CISPO(Anchored):
    """The log-probability, weighted by a ratio that is clipped and detached."""

    kind: Literal["cispo"] = "cispo"
    bounds: Literal["relative", "absolute"] = "relative"
    """clip_low and clip_high are distances from 1, or the bounds themselves."""
    clip_low: float | None = Field(None, ge=0)
    """Lower clip of the ratio; None: none."""
    clip_high: float = Field(4.0, ge=0)
    """Upper clip of the ratio."""
    level: Literal["token", "document", "segment"] = "token"
    """Unit of the ratio: the token, or the geometric mean over the document or over each unbroken run of its trained
    tokens."""
    log_clamp: float | None = Field(None, gt=0)
    """Bound of |log ratio|; the weight of a token beyond it is the bound's. None: none."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> CISPO:
        if self.bounds == "absolute" and above(self.clip_low, self.clip_high):
            raise ValueError("clip_low is above clip_high, and with absolute bounds they are the bounds themselves")
        return self


class SFT(Surrogate):
    """Negative log-likelihood, of smoothed labels if requested."""

    reads_advantages: ClassVar[bool] = False

    kind: Literal["sft"] = "sft"
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of each label that is spread evenly over the whole vocabulary, the label's own token included, as in
    torch's cross_entropy. (Megatron's setting e is e (V - 1) / V here.)"""
