"""Loss and gradient coefficient as functions of the ratio, for any spec and several at once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workbench.compare.comparison import flatten
from workbench.errors import SpecError, check_kind
from workbench.losses.build import ratio_curves
from workbench.metrics.quantities import clip_rule
from workbench.report import style
from workbench.report.numbers import significant
from workbench.report.style import svg_text
from workbench.specs.losses import PRESETS, LossSpec

POINTS = 241
LOWEST, HIGHEST = 0.02, 6.0
"""Largest default range of ratios."""

Specs = LossSpec | str | Sequence[LossSpec | str] | Mapping[str, LossSpec | str]
"""One loss, several, or several by name; a string is the name of a preset."""


def loss_curves(
    specs: Specs,
    *,
    advantages: Sequence[float] = (1.0, -1.0),
    ratios: tuple[float, float] | None = None,
    anchor_probability: float | None = None,
) -> Figure:
    """Draw loss and gradient coefficient of one token against its ratio.

    A row for each advantage; on the left the loss, on the right its derivative by the log-probability of the token.
    Losses are drawn as the difference from their value at a ratio of 1, for a constant moves nothing; where part of a
    loss stands under a stop-gradient (cispo), the slope on the left is not the coefficient on the right, and only the
    right one trains. Dotted lines are clip bounds, each in the hue of its loss. A document here has one token: a
    sequence ratio is the token's.

    Args:
        specs: one loss, several, or several by name; a string is the name of a preset.
        advantages: advantages of the token; a row each.
        ratios: the ends of the horizontal axis; None includes all clip bounds.
        anchor_probability: probability of the token before it moved, see `workbench.losses.build.ratio_curves`.

    Raises:
        SpecError: no loss or no advantage, a range without 1 inside, a loss over pairs.
    """
    named = name_specs(specs)
    low, high = ratios or _reach(named.values())
    if not named or not advantages or not 0 < low < 1 < high:
        raise SpecError(
            f"curves of {len(named)} losses and {len(advantages)} advantages from {low:g} to {high:g}",
            rule="at least one of each, and a range of ratios above 0 with 1 inside",
            fix="name a loss; widen the range",
        )
    figure = style.chart(0.5 + 2.35 * len(advantages))
    grid = figure.subplots(len(advantages), 2, squeeze=False, sharex=True)
    looks = style.line_styles(list(named))
    for advantage, (left, right) in zip(advantages, grid, strict=True):
        x = "ratio" if left is grid[-1][0] else ""
        style.tidy(left, title=f"advantage {significant(advantage, 2)}", y="loss − loss at ratio 1", x=x)
        style.tidy(right, title=" ", y="gradient coefficient, d loss / d log-probability", x=x)
        for name, spec in named.items():
            ratios_T = _grid(spec, advantage, low, high)
            loss_T, coefficient_T = ratio_curves(spec, ratios_T, advantage, anchor_probability=anchor_probability)
            at_one = loss_T[int((ratios_T - 1).abs().argmin())]
            for axes, values_T in ((left, loss_T - at_one), (right, coefficient_T)):
                axes.plot(ratios_T.tolist(), values_T.tolist(), label=name, linewidth=1.8, **looks[name])
        for axes in (left, right):
            axes.set_xlim(low, high)
            _mark(axes, named, advantage, looks)
    handles = [Line2D([], [], label=name, linewidth=1.8, **looks[name]) for name in named]
    style.legend(figure, handles, "outside right center", labelspacing=0.8)
    return figure


def name_specs(specs: Specs) -> dict[str, LossSpec]:
    """Name losses for a legend: by preset, with the settings that differ from it where names collide.

    Example:
        >>> list(name_specs([LossSpec(name="ppo"), LossSpec(name="ppo", surrogate={"clip_high": 0.3})]))
        ['ppo', 'ppo clip_high=0.3']
    """
    if isinstance(specs, Mapping):
        return {name: _loss(spec) for name, spec in specs.items()}
    listed = [_loss(spec) for spec in ([specs] if isinstance(specs, LossSpec | str) else specs)]
    count = Counter(spec.name for spec in listed)
    named: dict[str, LossSpec] = {}
    for spec in listed:
        label = spec.name
        if count[label] > 1:
            changed = flatten(spec.overrides()).items()
            label = " ".join(
                [label, *(f"{key.removeprefix('surrogate.')}={value}" for key, value in changed if key != "name")]
            )
        repeats = (f"{label} ({number})" for number in itertools.count(2))
        named[next(name for name in itertools.chain([label], repeats) if name not in named)] = spec
    return named


def _loss(spec: LossSpec | str) -> LossSpec:
    check_kind("curves of losses", spec, (LossSpec, str), "pass LossSpecs, or names of presets such as 'grpo'")
    return LossSpec(name=spec) if isinstance(spec, str) else spec


def bounds_of(spec: LossSpec, advantage: float) -> list[float]:
    """Return the ratios at which the loss clips for an advantage of this sign; [] if it does not bound the ratio."""
    rule = clip_rule(spec)
    if rule is None:
        return []
    bounds = [rule.lower, rule.upper, *([rule.dual] if rule.dual is not None and advantage < 0 else [])]
    return [bound for bound in bounds if 0 < bound < math.inf]


def _reach(specs: Any) -> tuple[float, float]:
    """Return a range that shows every bound, with a margin on both sides."""
    bounds = [bound for spec in specs for bound in bounds_of(spec, -1.0)]
    return max(LOWEST, min([0.6, *bounds]) - 0.4), min(HIGHEST, max([1.6, *bounds]) + 0.4)


def _grid(spec: LossSpec, advantage: float, low: float, high: float) -> torch.Tensor:
    """Return the ratios to draw: evenly spread, 1, and both sides of each bound, so that a cut looks like one."""
    near = [bound * (1 + side * 1e-9) for bound in bounds_of(spec, advantage) for side in (-1, 1)]
    inside = torch.tensor([1.0, *(ratio for ratio in near if low < ratio < high)], dtype=torch.float64)
    return torch.cat([torch.linspace(low, high, POINTS, dtype=torch.float64), inside]).unique()


def _mark(axes: Axes, named: Mapping[str, LossSpec], advantage: float, looks: Mapping[str, dict[str, Any]]) -> None:
    """Mark a ratio of 1, a value of 0 and the clip bounds inside the horizontal limits."""
    low, high = axes.get_xlim()
    axes.axvline(1, color=style.LINE, linewidth=0.9, zorder=0.5)
    axes.axhline(0, color=style.LINE, linewidth=0.9, zorder=0.5)
    for name, spec in named.items():
        look = {"color": looks[name]["color"], "linewidth": 0.9, "linestyle": (0, (1, 2)), "zorder": 0.8}
        for bound in bounds_of(spec, advantage):
            if low <= bound <= high:
                axes.axvline(bound, gid=f"bound-{name}", **look)
    for axis in (axes.xaxis, axes.yaxis):
        style.plain_ticks(axis)


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
        bounds = {"clip_low": self.low.value, "clip_high": self.high.value}
        losses = self.choice.value
        self.drawing.value = draw(losses, **bounds, advantage=self.sign.value) if losses else "<p>Choose a loss.</p>"


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
