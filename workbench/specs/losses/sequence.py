"""Settings of surrogates with one ratio per document. Formulas: `workbench.losses.sequence`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from workbench.specs.losses.base import Anchored, ClipHigh, ClipLow


class GSPO(Anchored):
    """A document's geometric-mean ratio, clipped."""

    kind: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a document with negative advantage loses its gradient; None: never."""
    delta: float | None = Field(None, gt=0)
    """The two-sided bound: min(ratio, delta) in the unclipped branch; None: none."""
    level: Literal["document", "segment"] = "document"
    """Unit of the ratio, a geometric mean: the document, or each unbroken run of its trained tokens."""
    advantage_level: Literal["token", "document"] = "token"
    """Each token keeps its advantage, or takes the mean over its document."""


class GSPOToken(Anchored):
    """GSPO with the gradient of each token's own ratio."""

    kind: Literal["gspo_token"] = "gspo_token"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a token with negative advantage loses its gradient; None: never."""
    level: Literal["document", "segment"] = "document"
    """Unit of the ratio, a geometric mean: the document, or each unbroken run of its trained tokens."""
    log_cap: float | None = Field(None, gt=0)
    """Greatest log of the ratio; a token above it has no gradient. None: none."""


class LUSPO(Anchored):
    """GSPO's ratio times the document's length."""

    documents_by_definition: ClassVar[bool] = True

    kind: Literal["luspo"] = "luspo"
    clip_low: ClipLow = 2e-3
    clip_high: ClipHigh = 2.5e-3
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a document with negative advantage loses its gradient; None: never."""
    delta: float | None = Field(None, gt=0)
    """The two-sided bound: min(ratio, delta) in the unclipped branch; None: none."""
    advantage_level: Literal["token", "document"] = "token"
    """Each token keeps its advantage, or takes the mean over its document."""


class GMPO(Anchored):
    """The geometric mean of token ratios that are clipped in logs."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, ge=0)
    """Distance from 0 down to the lower clip bound of the log ratio."""
    clip_high: float = Field(0.4, ge=0)
    """Distance from 0 up to the upper clip bound of the log ratio."""


class VESPO(Anchored):
    """The log-probability, weighted by a smooth function of the document's ratio."""

    documents_by_definition: ClassVar[bool] = True
    has_sequence_weight: ClassVar[bool] = True

    kind: Literal["vespo"] = "vespo"
    k_positive: float = Field(2.0, ge=0)
    """Power of the sequence weight where the advantage is not negative."""
    lambda_positive: float = Field(3.0, ge=0)
    """Decay of the sequence weight where the advantage is not negative."""
    k_negative: float = Field(3.0, ge=0)
    """Power of the sequence weight elsewhere."""
    lambda_negative: float = Field(2.0, ge=0)
    """Decay of the sequence weight elsewhere."""
