"""Loss curves with sliders for the clip bounds, in a notebook.

The figure is a function of the controls (`draw`), so that it works without a browser too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets

from workbench.report.loss_curves import loss_curves
from workbench.report.style import svg_text
from workbench.specs.losses import PRESETS, LossSpec

ADVANTAGES = {"both": (1.0, -1.0), "positive": (1.0,), "negative": (-1.0,)}
CURVED = tuple(name for name in PRESETS if not LossSpec(name=name).needs_pairs)
"""Presets that have a curve over the ratio."""
TOKEN_CLIPPED = ("ppo", "clip_cov")
"""Surrogates whose bounds are distances from 1 of a token's ratio."""


class LossExplorer(widgets.VBox):
    """Curves of chosen losses, redrawn when a control moves.

    Clip bounds are set on the losses that clip a token's ratio at a distance from 1 (`takes_bounds`); the others keep
    their own, which have another scale or limit another quantity.

    Args:
        losses: presets chosen initially.
        clip_low: initial distance from 1 down.
        clip_high: initial distance from 1 up.

    Attributes:
        choice, low, high, sign: the controls.
        drawing: an HTML widget that holds the figure.
    """

    def __init__(
        self,
        losses: Sequence[str] = ("grpo", "dual_clip"),
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        **more: Any,
    ) -> None:
        self.choice = widgets.SelectMultiple(options=CURVED, value=tuple(losses), rows=7, description="losses")
        self.low, self.high = (
            widgets.FloatSlider(value=value, min=0.0, max=0.95, step=0.01, description=name, continuous_update=False)
            for name, value in (("clip_low", clip_low), ("clip_high", clip_high))
        )
        self.sign = widgets.ToggleButtons(options=list(ADVANTAGES), description="advantage")
        self.drawing = widgets.HTML()
        for control in (self.choice, self.low, self.high, self.sign):
            control.observe(self._redraw, names="value")
        self._redraw()
        sliders = widgets.VBox([self.low, self.high, self.sign])
        super().__init__([widgets.HBox([self.choice, sliders]), self.drawing], **more)

    def _redraw(self, _: Any = None) -> None:
        if not self.choice.value:
            self.drawing.value = "<p>Choose a loss.</p>"
            return
        self.drawing.value = draw(
            self.choice.value, clip_low=self.low.value, clip_high=self.high.value, advantage=self.sign.value
        )


def draw(losses: Sequence[str], *, clip_low: float, clip_high: float, advantage: str = "both") -> str:
    """Draw the curves of some presets as an SVG element."""
    specs = {name: with_bounds(name, clip_low, clip_high) for name in losses}
    text = svg_text(loss_curves(specs, advantages=ADVANTAGES[advantage]))
    return text[text.index("<svg") :]


def takes_bounds(spec: LossSpec) -> bool:
    """True if the loss clips the ratio of a token at distances from 1, as PPO does."""
    return spec.surrogate.kind in TOKEN_CLIPPED


def with_bounds(name: str, clip_low: float, clip_high: float) -> LossSpec:
    """Return a preset with these clip bounds, or unchanged if its bounds are of another kind."""
    spec = LossSpec(name=name)
    if not takes_bounds(spec):
        return spec
    return LossSpec(name=name, surrogate={"clip_low": clip_low, "clip_high": clip_high})
