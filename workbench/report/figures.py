"""Every figure: a function that takes a comparison and returns a matplotlib figure.

The report page and the notebooks draw with the same functions. None of them displays anything, and none leaves a
configuration out silently: one without a number is named.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from workbench.compare.comparison import Comparison, Configuration
from workbench.report import style
from workbench.report.evidence import AGREEING, divergence, groups, relative_error, relative_text, worst_share
from workbench.report.numbers import mebibytes, milliseconds, near_one, significant
from workbench.report.series import (
    SeriesStyle,
    agreeing_of,
    dash_of,
    gradient_norm_by_step,
    legend,
    legend_inches,
    loss_by_step,
    series_styles,
)

STEP_MS = "time/step_ms"
PEAK_BYTES = "memory/peak_bytes"
MOST_OF_BUDGET = 1e20
"""Multiples of the budget beyond which a distance is drawn as an arrow: the axis would hold nothing else."""


def verdicts(comparison: Comparison) -> Figure:
    """Draw each configuration's worst distance in units of its budget, on one logarithmic axis.

    Left of 1 a configuration is within its budget. A distance of exactly 0 has no place on the axis and is
    written as such, as is a run that failed; one beyond the axis is an arrow at its edge. On the right are the verdict
    and the relative error of the gradient, which the budget does not tell: a budget can be 1e-12 of the gradient.
    """
    rows = [c for c in comparison.configurations if c.against or c.state != "succeeded"]
    if not rows:
        return style.empty("nothing to compare: every configuration is a reference", height_inches=1.1)
    figure = style.chart(1.1 + 0.25 * len(rows))
    axes = figure.subplots()
    style.tidy(
        axes,
        title=f"{comparison.experiment}: distance from the reference, in units of the budget",
        x="worst distance ÷ budget, over steps and parameters (logarithmic)",
        grid="x",
    )
    shares = {c.name: worst_share(c) for c in rows}
    drawn = [s for s in shares.values() if s is not None and style.drawable(s) > 0]
    low = 10.0 ** math.floor(math.log10(max(min([*drawn, 0.1]), 1 / MOST_OF_BUDGET)) - 0.3)
    high = 10.0 ** math.ceil(math.log10(min(max([*drawn, 10.0]), MOST_OF_BUDGET)) + 0.3)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.axvspan(low, 1, color=style.VERDICT_STYLES["equal"].color, alpha=0.06, linewidth=0)
    axes.axvline(1, color=style.INK, linewidth=0.9)
    for row, c in enumerate(rows):
        look, value = style.VERDICT_STYLES[c.verdict], shares[c.name]
        if value is not None and value > 0:
            end = min(max(value, low), high)
            axes.plot([low, end], [row, row], color=look.color, linewidth=2, alpha=0.35)
            marker = look.marker if end == value else ">" if value > high else "<"
            style.marks(axes, [end], [row], look.color, marker, 5.5, clip_on=end == value)
        elif value == 0:
            style.marks(axes, [low], [row], look.color, "|", 9, clip_on=False)
        factor = f", factor {near_one(c.factor)}" if c.factor is not None and c.verdict == "different" else ""
        meaning = f" ({c.factor_meaning})" if factor and 0 < len(c.factor_meaning) < 16 else ""
        diverged = f", {divergence(c)}" if divergence(c) else ""
        _annotate_right(axes, row, relative_text(relative_error(c)), color=style.INK)
        _annotate_right(axes, row, f"{look.sign} {c.verdict}{factor}{meaning}{diverged}", color=look.color, points=62)
    _annotate_right(axes, -0.9, "relative error", color=style.MUTED)
    _annotate_right(axes, -0.9, "verdict", color=style.MUTED, points=62)
    _name_rows(axes, rows)
    style.log_ticks(axes.xaxis)
    return figure


def _name_rows(axes: Axes, rows: Sequence[Configuration]) -> None:
    axes.set_yticks(range(len(rows)), [style.elided(c.name) for c in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", colors=style.INK)


def _annotate_right(axes: Axes, row: float, text: str, *, color: str, points: float = 0.0) -> None:
    """Annotate a row on its right, so many points from the edge of the axes."""
    axes.annotate(
        text,
        (1, row),
        xycoords=axes.get_yaxis_transform(),
        xytext=(8 + points, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        color=color,
    )


MOST_COLUMNS = 40
"""Configurations of which every parameter is drawn and listed: at 35, both are half of a page of 1.5 MB, and the
layout of the columns takes a time that grows faster than their number."""


def notable(comparison: Comparison) -> list[Configuration]:
    """Return the configurations with parameters, in their order; of more than `MOST_COLUMNS`, the furthest ones.

    Those that do not agree come first, then those that use the largest share of their budget.
    """
    compared = [c for c in comparison.configurations if c.parameters]

    def furthest(index: int) -> tuple[bool, float]:
        c = compared[index]
        share = worst_share(c)
        return c.verdict not in AGREEING, math.inf if share is None or math.isnan(share) else share

    chosen = sorted(range(len(compared)), key=furthest, reverse=True)[:MOST_COLUMNS]
    return [compared[index] for index in sorted(chosen)]


def norm_ratios(comparison: Comparison, *, step: int = 0) -> Figure:
    """Draw each parameter's gradient norm over the reference's, one column for each configuration.

    Parameters run downwards in the model's order; configurations are those of `notable`. The line is 1, where a
    correct configuration lies from top to bottom. Hollow marks are parameters judged by the floor. A ratio beyond
    the axis is an arrow at its edge, with the range of all such ratios under the name, where those that are not a
    number are counted too.
    """
    shown = [c for c in notable(comparison) if any(p.step == step for p in c.parameters)]
    if not shown:
        return style.empty(f"no per-parameter gradients were recorded at step {step}")
    names = list(dict.fromkeys(p.parameter for c in shown for p in c.parameters if p.step == step))
    place = {name: row for row, name in enumerate(names)}
    ratios = [p.norm_ratio for c in shown for p in c.parameters if p.step == step]
    reach = min(2.2, max([abs(math.log2(r)) for r in ratios if r > 0 and math.isfinite(r)] + [0.7]) * 1.25)
    # at most 10: the longest part of a common name, such as denominator, is as wide as a tenth of the figure
    per_row = -(-len(shown) // -(-len(shown) // 10))
    blocks = [shown[i : i + per_row] for i in range(0, len(shown), per_row)]
    figure = style.chart((0.9 + 0.152 * len(names)) * len(blocks) + 0.1)
    columns = max(6, min(per_row, len(shown)))
    # Axes that do not share: of shared ones, matplotlib sets every limit, scale and tick of one on all others.
    grid = figure.subplots(len(blocks), columns, squeeze=False)
    labels = [n.removeprefix("model.").removesuffix(".weight") for n in names]
    for block, row in zip(blocks, grid, strict=True):
        for axes in row[len(block) :]:
            axes.set_visible(False)
        for c, axes in zip(block, row, strict=False):
            _ratio_column(axes, c, [p for p in c.parameters if p.step == step], place, reach, width=110 // columns + 1)
            axes.set_ylim(len(names) - 0.3, -0.7)
            axes.yaxis.set_visible(axes is row[0])
            axes.xaxis.set_visible(block is blocks[-1])
            if block is blocks[-1]:
                axes.set_xticks([0.5, 1, 2], ["½", "1", "2"], fontsize=7)
        row[0].set_yticks(range(len(names)), labels, fontsize=7)
    return figure


def _ratio_column(
    axes: Axes, c: Configuration, parameters: Sequence[Any], place: dict[str, int], reach: float, *, width: int
) -> None:
    look = style.VERDICT_STYLES[c.verdict]
    style.tidy(axes, grid="")
    rows = axes.get_yaxis_transform(which="grid")
    for layer, name in enumerate(place):
        if _layer(name) % 2 == 0:
            band = Rectangle((0, layer - 0.5), 1, 1, transform=rows, color=style.LINE, alpha=0.3, linewidth=0)
            axes.add_artist(band)  # axhspan would also search the limits of the axes, which are set below
    title = style.wrapped(f"{look.sign} {style.elided(c.name)}", width)
    axes.set_title(title, y=1.0, fontsize=7, color=look.color, loc="left", linespacing=1.25, pad=12)
    axes.axvline(1, color=style.MUTED, linewidth=0.6, zorder=0.5)
    how: dict[str, Any] = {"color": look.color, "marker": "o", "markersize": 3.2, "markeredgewidth": 0.8}
    ratios = [style.drawable(p.norm_ratio) for p in parameters]
    axes.plot(ratios, [place[p.parameter] for p in parameters], linewidth=0.7, label=c.name, **how)
    hollow = [p for p in parameters if p.judged_by == "floor"]
    ratios, places = [style.drawable(p.norm_ratio) for p in hollow], [place[p.parameter] for p in hollow]
    axes.plot(ratios, places, linestyle="none", markerfacecolor="#ffffff", **how)
    low, high, notes = 2.0**-reach, 2.0**reach, []
    for edge, arrow, beyond in (
        (low, "<", [p for p in parameters if p.norm_ratio < low]),
        (high, ">", [p for p in parameters if p.norm_ratio > high]),
    ):
        if beyond:
            places = [place[p.parameter] for p in beyond]
            style.marks(axes, [edge] * len(beyond), places, look.color, arrow, 4, clip_on=False)
            ends = dict.fromkeys(significant(f(p.norm_ratio for p in beyond), 2) for f in (min, max))
            notes.append(f"{arrow} " + " to ".join(ends))
    if lost := sum(math.isnan(p.norm_ratio) for p in parameters):
        notes.append(f"{lost} not a number")
    style.remark(axes, "\n".join(notes), (0, 1), offset=(0, 1), fontsize=6.5, color=look.color)
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.minorticks_off()
    axes.xaxis.set_label_coords(0, 0)  # as of `style.tidy`: it has no label


def importance_ratios(comparison: Comparison, *, steps: Sequence[int] | None = None) -> Figure:
    """Draw the distribution of policy / old probability over trained tokens.

    A row for each reference, a column for each step. Vertical lines are the clip bounds, 1 - clip_low and
    1 + clip_high.

    Args:
        comparison: what to draw.
        steps: optimizer steps; None takes up to four, the first and the last among them.
    """
    recorded = sorted({int(s) for c in comparison.configurations for s in c.ratios})
    if steps is None:
        places = dict.fromkeys(round(i * (len(recorded) - 1) / 3) for i in range(4))  # evenly spread, both ends too
        steps = [recorded[place] for place in places] if recorded else []
    rows = {ref: shown for ref, members in groups(comparison).items() if (shown := [c for c in members if c.ratios])}
    if not rows or not steps:
        return style.empty("no importance ratios were recorded")
    looks = series_styles(comparison)
    figure = style.chart(max(0.5 + 1.75 * len(rows), legend_inches(rows, looks)))
    grid = figure.subplots(len(rows), len(steps), squeeze=False, sharey="row")
    for (reference, members), line in zip(rows.items(), grid, strict=True):
        for step, axes in zip(steps, line, strict=True):
            _histograms(axes, members, step, looks)
            first = axes is line[0]
            style.tidy(
                axes,
                title=style.elided(reference) if first else " ",
                x="importance ratio",
                y=f"step {step}, share of trained tokens" if first else f"step {step}",
            )
            if axes.patches:  # an axis without a positive value cannot be logarithmic
                axes.set_yscale("log")
            style.log_ticks(axes.yaxis)
            if axes.get_xscale() == "log":
                style.log_ticks(axes.xaxis)
            else:
                axes.xaxis.set_major_locator(MaxNLocator(5))
                style.plain_ticks(axes.xaxis)
            axes.minorticks_off()  # of length 0 and without labels
    legend(figure, comparison, [c for members in rows.values() for c in members])
    return figure


def _histograms(axes: Axes, members: Sequence[Configuration], step: int, looks: dict[str, SeriesStyle]) -> None:
    used: list[float] = []
    bins = {c.name: _bins(c.ratios.get(str(step))) for c in members}
    totals = {name: sum(n for *_, n in listed) for name, listed in bins.items()}
    for c in members:
        placed = itertools.groupby(bins[c.name], lambda item: math.isfinite(item[1] - item[0]))
        longest = max((list(run) for finite, run in placed if finite), key=len, default=[])
        if not any(n for *_, n in longest):
            continue
        look, reference = looks[c.name], not c.against
        axes.stairs(
            [n / totals[c.name] for *_, n in longest],
            [longest[0][0], *(high for _, high, _ in longest)],
            baseline=0,
            color=look.color,
            label=c.name,
            linewidth=5 if reference else 2.4 if c.verdict == "different" else 1.2,
            alpha=0.2 if reference else 1,
            zorder=2 if reference or c.verdict == "different" else 3,
            linestyle="-" if reference else dash_of(c, agreeing_of(members), look),
        )
        if reference or c.verdict in AGREEING:
            used += [edge for low, high, n in longest if n for edge in (low, high)]
    loss = members[0].settings.get("loss", {})
    surrogate = loss.get("surrogate", loss)  # older records, of one surrogate, hold the bounds themselves
    for name, sign in (("clip_low", -1), ("clip_high", 1)):
        if surrogate.get("kind", "ppo") == "ppo" and math.isfinite(style.drawable(surrogate.get(name))):
            axes.axvline(1 + sign * surrogate[name], color=style.MUTED, linewidth=0.8, linestyle=(0, (1.5, 1.5)))
            used.append(1 + sign * surrogate[name])
    least, most = min(used, default=0.0), max(used, default=0.0)
    if least > 0 and most / least > 8:
        axes.set_xscale("log")
        axes.set_xlim(least / 1.1, most * 1.1)
    elif used:
        room = 0.06 * (most - least or 1)
        axes.set_xlim(least - room, most + room)
    left, right = axes.get_xlim()
    notes = []
    for c in members:
        beyond = sum(
            n for low, high, n in bins[c.name] if high <= left or low >= right or not math.isfinite(high - low)
        )
        if beyond:
            notes.append(f"{significant(100 * beyond / totals[c.name], 2)} % of {looks[c.name].label}")
    if notes:
        box = {"facecolor": "#ffffff", "linewidth": 0, "pad": 1}
        style.remark(axes, "\n".join(["beyond this axis:", *notes]), (0.02, 0.9), va="top", fontsize=6, bbox=box)


def _bins(histogram: Mapping[str, Sequence[float]] | None) -> list[tuple[float, float, float]]:
    """Return (low, high, count) of each bin; an edge that has no place on an axis is NaN."""
    if histogram is None:
        return []
    edges = itertools.pairwise(map(style.drawable, histogram["edges"]))
    return [(low, high, n) for (low, high), n in zip(edges, histogram["counts"], strict=False)]


def time_and_memory(comparison: Comparison) -> Figure:
    """Draw the duration of steps and the peak memory, a row for each configuration.

    A mark a step; the first step, which also warms up, is hollow; the bar is the median of the others.
    """
    rows = comparison.configurations
    figure = style.chart(0.9 + 0.21 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    quantities: tuple[tuple[Axes, str, str, float, Callable[[float], str]], ...] = (
        (left, STEP_MS, "duration of a step, rank 0 (ms; median on the right)", 1.0, milliseconds),
        (right, PEAK_BYTES, "peak memory so far, rank 0 (MiB; median on the right)", 2.0**20, mebibytes),
    )
    for axes, key, title, unit, written in quantities:
        style.tidy(axes, title=title, grid="x")
        for row, c in enumerate(rows):
            recorded = [step[key] / unit for step in c.steps if step.get(key) is not None]
            values = [value for value in recorded if math.isfinite(style.drawable(value))]
            look = style.VERDICT_STYLES[c.verdict]
            if not values:
                state = "" if c.state == "succeeded" else f"{c.state}, "
                text = f"  {state}{'not finite' if recorded else 'not recorded'}"
                axes.text(0, row, text, va="center", fontsize=7, color=style.MUTED)
                continue
            middle = statistics.median(values[1:] or values)
            axes.barh(row, middle, height=0.62, color=look.color, alpha=0.25, linewidth=0)
            style.marks(axes, values, [row] * len(values), look.color, "o", 3, label=c.name)
            style.marks(axes, values[:1], [row], look.color, "o", 3, markerfacecolor="#ffffff")
            edge = axes.get_yaxis_transform()
            axes.text(1.01, row, written(middle * unit), transform=edge, va="center", fontsize=7, color=style.INK)
        axes.set_xlim(0, max(axes.get_xlim()[1], style.TINY))
        style.plain_ticks(axes.xaxis, 4)
    _name_rows(left, rows)
    return figure


def _layer(parameter: str) -> int:
    """Return the first number in a parameter's name, -1 if there is none."""
    return next((int(part) for part in parameter.split(".") if part.isdigit()), -1)


__all__ = [
    "gradient_norm_by_step",
    "importance_ratios",
    "loss_by_step",
    "norm_ratios",
    "time_and_memory",
    "verdicts",
]
