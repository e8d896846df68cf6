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
from workbench.report.numbers import power_of_ten

LOSS = "loss/total/sum"
GRADIENT_NORM = "gradient/norm/global"
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
    for configuration in comparison.configurations:
        kinds.setdefault(repr(sorted(changed_settings(comparison, configuration).items(), key=str)), []).append(
            configuration
        )
    styles, hue = {}, 0
    for members in kinds.values():
        names = [c.name for c in members]
        label = names[0] if len(names) == 1 else _common_start(names) or names[0]
        if not members[0].against:
            drawn = SeriesStyle(label, style.INK, "", "-")
        else:
            turn = hue // len(style.SERIES)
            drawn = SeriesStyle(
                label,
                style.SERIES[hue % len(style.SERIES)],
                style.MARKERS[(hue + turn) % len(style.MARKERS)],
                style.DASHES[(hue + turn) % len(style.DASHES)],
            )
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
    panels = {ref: [c for c in members if recorded(c, key)] for ref, members in groups(comparison).items()}
    panels = {ref: members for ref, members in panels.items() if members}
    if not panels:
        return style.empty(f"{key} was not recorded")
    looks = series_styles(comparison)
    figure = style.chart(max(0.4 + 2.6 * -(-len(panels) // style.PANELS_A_ROW), legend_inches(panels, looks)))
    series = {c.name: recorded(c, key) for members in panels.values() for c in members}
    placed = {name: list(map(style.drawable, values.values())) for name, values in series.items()}
    drawn = [v for values in placed.values() for v in values if math.isfinite(v)]
    sound = [
        v
        for members in panels.values()
        for c in members
        if not c.against or c.verdict in AGREEING
        for v in placed[c.name]
        if math.isfinite(v)
    ]
    scale, reach = _scale(drawn, sound)
    title += {"linear": "", "log": ", logarithmic", "asinh": ", linear near 0 and logarithmic beyond"}[scale]
    for axes, (reference, members) in zip(style.panels(figure, len(panels), sharey=True), panels.items(), strict=True):
        lost = mark_not_finite(
            axes,
            {c.name: series[c.name] for c in members},
            {c.name: looks[c.name].color for c in members},
            characters=130 // min(len(panels), style.PANELS_A_ROW),
        )
        style.tidy(axes, title=reference, y=title, x="\n".join(["optimizer step", *lost]))
        agreeing = agreeing_of(members)
        for order, c in enumerate(members):
            look = looks[c.name]
            x, y = list(series[c.name]), placed[c.name]
            if not c.against and len(members) == 1:
                axes.plot(x, y, color=look.color, linewidth=1.2, label=c.name, **_dot(y))
                continue
            if not c.against:
                axes.plot(
                    x, y, color=look.color, linewidth=6, alpha=0.16, label=c.name, solid_capstyle="round", **_dot(y)
                )
                continue
            axes.plot(
                x,
                y,
                color=look.color,
                linewidth=1.7,
                linestyle=dash_of(c, agreeing, look),
                marker=look.marker,
                markersize=4.6,
                markeredgewidth=1.0,
                markerfacecolor="none" if c in agreeing else look.color,
                label=c.name,
                zorder=3 + order / 100,
            )
        style.step_ticks(axes.xaxis, (step["step"] for c in members for step in c.steps))
        axes.margins(x=0.06, y=0.12)
        if scale == "asinh":
            axes.set_yscale("asinh", linear_width=reach)
            axes.yaxis.set_major_locator(style.DecadesAroundZero(reach))
        elif scale == "log":
            axes.set_yscale("log")
        (style.log_ticks if scale == "log" else style.plain_ticks)(axes.yaxis)
    legend(figure, comparison, [c for members in panels.values() for c in members])
    return figure


def recorded(c: Configuration, key: str) -> dict[int, float]:
    """Return step -> value of a metric, as recorded."""
    return {record["step"]: float(record[key]) for record in c.steps if record.get(key) is not None}


def _dot(values: Sequence[float]) -> dict[str, Any]:
    """Return a mark for a line of a single point, which would be invisible."""
    return {"marker": "o", "markersize": 4} if sum(map(math.isfinite, values)) == 1 else {}


def mark_not_finite(
    axes: Axes,
    series: Mapping[str, Mapping[int, float]],
    colors: Mapping[str, str],
    *,
    characters: int,
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
            style.marks(
                axes,
                [next(iter(off))],
                [1],
                colors[name],
                "x",
                5,
                transform=axes.get_xaxis_transform(),
                markeredgewidth=1.4,
                clip_on=False,
                gid=f"lost-{name}",
            )
            lost.setdefault(f"{what} {which_steps(list(off), list(values))}", []).append(name)
    return ["\n".join(textwrap.wrap(f"× {text}: {_listed(names)}", characters)) for text, names in lost.items()]


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more])


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
    return 0.35 + 0.2 * len({looks[c.name] for members in panels.values() for c in members})


def legend(figure: Figure, comparison: Comparison, shown: Sequence[Configuration]) -> None:
    """Draw one legend entry per kind, next to the panels."""
    looks = series_styles(comparison)
    kinds = {looks[c.name]: c for c in shown}
    handles = [
        Line2D(
            [],
            [],
            color=look.color,
            marker=look.marker,
            linestyle=look.dash,
            linewidth=1.7,
            markersize=4.6,
            label=look.label,
            markerfacecolor="none" if c.verdict in AGREEING else look.color,
        )
        if c.against
        else Line2D([], [], color=look.color, linewidth=6, alpha=0.16, label=f"{look.label} (reference)")
        for look, c in kinds.items()
    ]
    style.legend(figure, handles, "outside right center", labelspacing=0.8)


def _common_start(names: Sequence[str]) -> str:
    """Return the dash-separated parts that all names begin with."""
    parts = zip(*(name.split("-") for name in names), strict=False)
    return "-".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, parts))
