"""Metrics by optimizer step, a line for each configuration; and what figures of several configurations share."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workbench.compare.comparison import Comparison, Configuration
from workbench.report import style
from workbench.report.evidence import AGREEING, changed_settings, groups, which_steps
from workbench.report.numbers import GRADIENT_NORM, LOSS, power_of_ten

MOST_NAMES = 4
DIVERGED = 50.0
"""Multiples of the median beyond which a loss or a gradient norm does not set the scale."""


@dataclass(frozen=True)
class SeriesStyle:
    """Style of one kind of configuration, the same in every panel of every figure.

    Attributes:
        label: name of the kind: the common beginning of the names of its configurations.
        color: hue.
        marker: shape.
        dash: matplotlib's line style.
    """

    label: str
    color: str
    marker: str
    dash: Any


def series_styles(comparison: Comparison) -> dict[str, SeriesStyle]:
    """Return a style for every configuration; those that change the same settings of their references share one."""
    kinds: dict[str, list[Configuration]] = {}
    for c in comparison.configurations:
        kinds.setdefault(repr(sorted(changed_settings(comparison, c).items(), key=str)), []).append(c)
    styles: dict[str, SeriesStyle] = {}
    hue = 0
    for members in kinds.values():
        names = [c.name for c in members]
        label = names[0] if len(names) == 1 else _common_start(names) or names[0]
        drawn = SeriesStyle(label, style.INK, "", "-")
        if members[0].against:
            color, turn = style.SERIES[hue % len(style.SERIES)], hue + hue // len(style.SERIES)
            marker, dash = style.MARKERS[turn % len(style.MARKERS)], style.DASHES[turn % len(style.DASHES)]
            drawn = SeriesStyle(label, color, marker, dash)
            hue += 1
        styles |= dict.fromkeys(names, drawn)
    return styles


def gradient_norm_by_step(comparison: Comparison) -> Figure:
    """Draw the global gradient norm of every configuration at every step; one panel for each reference."""
    return _lines(comparison, GRADIENT_NORM, "global gradient norm (L2)")


def loss_by_step(comparison: Comparison) -> Figure:
    """Draw the loss of every configuration at every step; one panel for each reference."""
    return _lines(comparison, LOSS, "loss")


def _lines(comparison: Comparison, key: str, title: str) -> Figure:
    """Draw one metric by step; a panel for each reference, one line for each configuration that recorded it.

    The reference is a broad pale line. Configurations that agree lie on it and on one another, so each of
    them gets its turn of one common dash: all stay visible along the same path.
    """
    panels = {
        ref: shown for ref, members in groups(comparison).items() if (shown := [c for c in members if recorded(c, key)])
    }
    if not panels:
        return style.empty(f"{key} was not recorded")
    looks = series_styles(comparison)
    figure = style.chart(max(0.4 + 2.6 * -(-len(panels) // style.PANELS_A_ROW), legend_inches(panels, looks)))
    everyone = [c for members in panels.values() for c in members]
    series = {c.name: recorded(c, key) for c in everyone}
    placed = {name: list(map(style.drawable, values.values())) for name, values in series.items()}
    drawn = [v for values in placed.values() for v in values if math.isfinite(v)]
    kept = [c.name for c in everyone if not c.against or c.verdict in AGREEING]
    scale, reach = _scale(drawn, [v for name in kept for v in placed[name] if math.isfinite(v)])
    title += {"linear": "", "log": ", logarithmic", "asinh": ", linear near 0 and logarithmic beyond"}[scale]
    placed_panels = style.panels(figure, len(panels), sharey=True)
    for place, (axes, (reference, members)) in enumerate(zip(placed_panels, panels.items(), strict=True)):
        lost = mark_not_finite(
            axes,
            {c.name: series[c.name] for c in members},
            {c.name: looks[c.name].color for c in members},
            characters=130 // min(len(panels), style.PANELS_A_ROW),
        )
        narrow = 76 // min(len(panels), style.PANELS_A_ROW)  # letters of 8 points, side by side in a row of panels
        heading = style.wrapped(style.elided(reference), narrow)
        style.tidy(
            axes,
            title=heading,
            y=title if place % style.PANELS_A_ROW == 0 or len(panels) < 4 else " ",
            x="\n".join(["optimizer step", *lost]),
        )
        agreeing = agreeing_of(members)
        for order, c in enumerate(members):
            look, x, y = looks[c.name], list(series[c.name]), placed[c.name]
            if not c.against:
                broad = {"linewidth": 6, "alpha": 0.16, "solid_capstyle": "round"}
                how = {"linewidth": 1.2} if len(members) == 1 else broad
                if sum(map(math.isfinite, y)) == 1:  # a line of a single point would be invisible
                    how |= {"marker": "o", "markersize": 4}
            else:
                how = {
                    "linewidth": 1.7,
                    "linestyle": dash_of(c, agreeing, look),
                    "marker": look.marker,
                    "markersize": 4.6,
                    "markeredgewidth": 1.0,
                    "markerfacecolor": "none" if c in agreeing else look.color,
                    "zorder": 3 + order / 100,
                }
            axes.plot(x, y, color=look.color, label=c.name, **how)
        style.step_ticks(axes.xaxis, (step["step"] for c in members for step in c.steps))
        axes.margins(x=0.06, y=0.12)
        if scale == "asinh":
            axes.set_yscale("asinh", linear_width=reach)
            axes.yaxis.set_major_locator(style.DecadesAroundZero(reach))
        elif scale == "log":
            axes.set_yscale("log")
        (style.log_ticks if scale == "log" else style.plain_ticks)(axes.yaxis)
    legend(figure, comparison, everyone)
    return figure


def recorded(c: Configuration, key: str) -> dict[int, float]:
    """Return step -> value of a metric, as recorded."""
    return {record["step"]: float(record[key]) for record in c.steps if record.get(key) is not None}


def mark_not_finite(
    axes: Axes, series: Mapping[str, Mapping[int, float]], colors: Mapping[str, str], *, characters: int
) -> list[str]:
    """Put a cross at the top edge of a panel where a line stops being finite; return lines of text that name it.

    Args:
        axes: the panel.
        series: name -> step -> value, from `recorded`.
        colors: name -> colour of its line.
        characters: that fit in a line of text below the panel.
    """
    lost: dict[str, list[str]] = {}
    for name, values in series.items():
        off = {step: value for step, value in values.items() if not math.isfinite(style.drawable(value))}
        if off:
            what = "not finite"
            if any(map(math.isfinite, off.values())):
                what += f" or beyond {power_of_ten(round(math.log10(style.HUGE)))}"
            edge = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            look = {"markeredgewidth": 1.4, "gid": f"lost-{name}"}
            style.marks(axes, [next(iter(off))], [1], colors[name], "x", 5, **edge, **look)
            lost.setdefault(f"{what} {which_steps(list(off), list(values))}", []).append(name)
    lines = []
    for text, names in lost.items():
        more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
        lines.append("\n".join(textwrap.wrap(f"× {text}: {', '.join([*names[:MOST_NAMES], *more])}", characters)))
    return lines


def _scale(drawn: Sequence[float], sound: Sequence[float]) -> tuple[str, float]:
    """Choose the y scale on which neither a fault that is far away nor a run that diverges flattens the rest.

    Returns:
        "linear", "log" or "asinh"; and up to where the last is linear.
    """
    sizes = [abs(value) for value in sound if value]
    reach = min(max(sizes), DIVERGED * statistics.median(sizes)) if sizes else 0.0
    if not reach or max(map(abs, drawn)) <= 20 * reach:
        return "linear", reach
    return ("log" if min(drawn) > 0 else "asinh"), reach


def agreeing_of(members: Sequence[Configuration]) -> list[Configuration]:
    """Return the configurations that agree with their reference."""
    return [c for c in members if c.against and c.verdict in AGREEING]


def dash_of(c: Configuration, agreeing: Sequence[Configuration], look: SeriesStyle) -> Any:
    """Return a line's own dash, or its turn of the dash that agreeing lines share."""
    if c not in agreeing or len(agreeing) == 1:
        return look.dash
    return (3.0 * agreeing.index(c), (3.0, 3.0 * (len(agreeing) - 1)))


def legend_inches(panels: Mapping[str, Sequence[Configuration]], looks: Mapping[str, SeriesStyle]) -> float:
    """Return the least height of a figure whose legend holds every kind; matplotlib cuts one that is taller."""
    return 0.5 + 0.21 * len({looks[c.name] for members in panels.values() for c in members})


def legend(figure: Figure, comparison: Comparison, shown: Sequence[Configuration]) -> None:
    """Draw one legend entry per kind, next to the panels."""
    looks = series_styles(comparison)
    handles = []
    for look, c in {looks[c.name]: c for c in shown}.items():
        if not c.against:
            handles.append(
                Line2D(
                    [], [], color=look.color, linewidth=6, alpha=0.16, label=f"{style.elided(look.label)} (reference)"
                )
            )
            continue
        face = "none" if c.verdict in AGREEING else look.color
        mark: dict[str, Any] = {"marker": look.marker, "markersize": 4.6, "markerfacecolor": face}
        handles.append(
            Line2D([], [], color=look.color, linestyle=look.dash, linewidth=1.7, label=style.elided(look.label), **mark)
        )
    style.legend(figure, handles, "outside right center", labelspacing=0.8)


def _common_start(names: Sequence[str]) -> str:
    """Return the dash-separated parts that all names begin with."""
    parts = zip(*(name.split("-") for name in names), strict=False)
    return "-".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, parts))
