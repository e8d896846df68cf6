"""Every figure: a function that takes a comparison and returns a matplotlib figure.

The report page and the notebooks draw with the same functions. None of them displays anything, and none leaves a
configuration out silently: one without a number is named.

    verdicts               distance from the reference, in units of the budget
    gradient_norm_by_step  the global gradient norm
    norm_ratios            per parameter, norm / reference norm
    importance_ratios      distribution over trained tokens, with the clip bounds
    loss_by_step           the loss
    time_and_memory        a step's duration and the peak of memory
"""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from workbench.compare.comparison import Comparison, Configuration, flatten
from workbench.report import style
from workbench.report.evidence import AGREEING, divergence, relative_error, relative_text, which_steps
from workbench.report.numbers import mebibytes, milliseconds, near_one, power_of_ten, significant

LOSS = "loss/total/sum"
GRADIENT_NORM = "gradient/norm/global"
STEP_MS = "time/step_ms"
PEAK_BYTES = "memory/peak_bytes"
MOST_OF_BUDGET = 1e20
"""Multiples of the budget beyond which a distance is drawn as an arrow: the axis would hold nothing else."""
MOST_NAMES = 4
DIVERGED = 50.0
"""Multiples of the median beyond which a loss or a gradient norm does not set the scale."""


# ---- values of a configuration ------------------------------------------------------------------------


def worst_share(configuration: Configuration) -> float | None:
    """Return the largest distance in units of its budget, over steps, parameters and the whole gradient.

    Above 1 something is out of budget. None where nothing was judged.
    """
    pairs = [(w.get("distance"), w.get("budget")) for w in configuration.whole_gradient]
    pairs += [(p.distance, p.budget) for p in configuration.parameters]
    shares = [share_of_budget(distance, budget) for distance, budget in pairs]
    return max((s for s in shares if s is not None), default=None)


def share_of_budget(distance: float | None, budget: float | None) -> float | None:
    """Return a distance in units of its budget; infinite where either is not finite, or where a budget of 0 is left.

    Example:
        >>> share_of_budget(3.0, 2.0), share_of_budget(0.0, 0.0), share_of_budget(1.0, 0.0)
        (1.5, 0.0, inf)
    """
    if distance is None or budget is None:
        return None
    if not (math.isfinite(distance) and math.isfinite(budget)):
        return math.inf
    if budget == 0:
        return math.inf if distance else 0.0
    return distance / budget


def is_bitwise_equal(configuration: Configuration) -> bool:
    """True if every recorded step has the reference's gradient, bit for bit."""
    steps = configuration.whole_gradient
    return bool(steps) and all(step.get("bitwise_equal") for step in steps)


def changed_settings(comparison: Comparison, configuration: Configuration) -> dict[str, Any]:
    """Return the settings in which a configuration differs from its reference, flat; of a reference, none."""
    if not configuration.against:
        return {}
    base = flatten(comparison[configuration.against].settings)
    return {
        key: value
        for key, value in flatten(configuration.settings).items()
        if key != "frozen_clip" and (key not in base or base[key] != value)
    }


def groups(comparison: Comparison) -> dict[str, list[Configuration]]:
    """Group configurations by the reference that they are compared with, the reference first."""
    members: dict[str, list[Configuration]] = {c.name: [c] for c in comparison.configurations if not c.against}
    for configuration in comparison.configurations:
        if configuration.against:
            members.setdefault(configuration.against, []).append(configuration)
    return members


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


# ---- the figures --------------------------------------------------------------------------------------


def verdicts(comparison: Comparison) -> Figure:
    """Draw each configuration's worst distance in units of its budget, on one logarithmic axis.

    Left of 1 a configuration is within its budget. A distance of exactly 0 has no place on the axis and is
    written as such, as is a run that failed; one beyond the axis is an arrow at its edge. On the right are the verdict
    and the relative error of the gradient, which the budget does not tell: a budget can be 1e-12 of the gradient.
    """
    rows = [c for c in comparison.configurations if c.against or c.state != "succeeded"]
    figure = style.chart(1.1 + 0.25 * len(rows))
    if not rows:
        style.note(figure, "nothing to compare: every configuration is a reference")
        return figure
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
            axes.plot(
                [end],
                [row],
                color=look.color,
                markersize=5.5,
                linestyle="none",
                clip_on=end == value,
                marker=look.marker if end == value else ">" if value > high else "<",
            )
        elif value == 0:
            axes.plot([low], [row], color=look.color, marker="|", markersize=9, linestyle="none", clip_on=False)
        factor = f", factor {near_one(c.factor)}" if c.factor is not None and c.verdict == "different" else ""
        meaning = f" ({c.factor_meaning})" if factor and 0 < len(c.factor_meaning) < 16 else ""
        diverged = f", {divergence(c)}" if divergence(c) else ""
        _annotate_right(axes, row, relative_text(relative_error(c)), color=style.INK)
        _annotate_right(axes, row, f"{look.sign} {c.verdict}{factor}{meaning}{diverged}", color=look.color, points=62)
    _annotate_right(axes, -0.9, "relative error", color=style.MUTED)
    _annotate_right(axes, -0.9, "verdict", color=style.MUTED, points=62)
    axes.set_yticks(range(len(rows)), [c.name for c in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", colors=style.INK)
    style.log_ticks(axes.xaxis)
    return figure


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


def gradient_norm_by_step(comparison: Comparison) -> Figure:
    """Draw the global gradient norm of every configuration at every step; one panel for each reference."""
    return _lines(comparison, GRADIENT_NORM, "global gradient norm (L2)")


def loss_by_step(comparison: Comparison) -> Figure:
    """Draw the loss of every configuration at every step; one panel for each reference."""
    return _lines(comparison, LOSS, "loss")


def norm_ratios(comparison: Comparison, *, step: int = 0) -> Figure:
    """Draw each parameter's gradient norm over the reference's, one column for each configuration.

    Parameters run downwards in the model's order. The line is 1, where a correct configuration lies from top
    to bottom. Hollow marks are parameters judged by the floor. A ratio beyond the axis is an arrow at its
    edge, with the range of all such ratios under the name, where those that are not a number are counted too.

    Args:
        comparison: what to draw.
        step: optimizer step, from 0.
    """
    shown = [c for c in comparison.configurations if any(p.step == step for p in c.parameters)]
    if not shown:
        figure = style.chart(1.2)
        style.note(figure, f"no per-parameter gradients were recorded at step {step}")
        return figure
    names = list(dict.fromkeys(p.parameter for c in shown for p in c.parameters if p.step == step))
    place = {name: row for row, name in enumerate(names)}
    ratios = [p.norm_ratio for c in shown for p in c.parameters if p.step == step]
    reach = min(2.2, max([abs(math.log2(r)) for r in ratios if r > 0 and math.isfinite(r)] + [0.7]) * 1.25)
    per_row = 14
    blocks = [shown[i : i + per_row] for i in range(0, len(shown), per_row)]
    figure = style.chart((0.9 + 0.152 * len(names)) * len(blocks) + 0.1)
    columns = max(6, min(per_row, len(shown)))
    grid = figure.subplots(len(blocks), columns, squeeze=False, sharex=True, sharey=True)
    for block, row in zip(blocks, grid, strict=True):
        for axes in row[len(block) :]:
            axes.set_visible(False)
        for c, axes in zip(block, row, strict=False):
            _ratio_column(axes, c, [p for p in c.parameters if p.step == step], place, reach, width=110 // columns + 1)
        row[0].set_yticks(range(len(names)), [_short(name) for name in names])
        row[0].set_ylim(len(names) - 0.3, -0.7)
        for axes in row:
            axes.tick_params(axis="y", length=0, labelsize=7, colors=style.MUTED)
    return figure


def _ratio_column(
    axes: Axes, c: Configuration, parameters: Sequence[Any], place: dict[str, int], reach: float, *, width: int
) -> None:
    look = style.VERDICT_STYLES[c.verdict]
    style.tidy(axes, grid="")
    for layer, name in enumerate(place):
        if _layer(name) % 2 == 0:
            axes.axhspan(layer - 0.5, layer + 0.5, color=style.LINE, alpha=0.3, linewidth=0)
    axes.set_title(
        _wrap(f"{look.sign} {c.name}", width), fontsize=7, color=look.color, loc="left", linespacing=1.25, pad=12
    )
    axes.axvline(1, color=style.MUTED, linewidth=0.6, zorder=0.5)
    rows = [place[p.parameter] for p in parameters]
    axes.plot(
        [style.drawable(p.norm_ratio) for p in parameters],
        rows,
        color=look.color,
        marker="o",
        markersize=3.2,
        linewidth=0.7,
        markeredgewidth=0.8,
        label=c.name,
    )
    hollow = [p for p in parameters if p.judged_by == "floor"]
    axes.plot(
        [style.drawable(p.norm_ratio) for p in hollow],
        [place[p.parameter] for p in hollow],
        color=look.color,
        marker="o",
        markersize=3.2,
        linestyle="none",
        markerfacecolor="#ffffff",
        markeredgewidth=0.8,
    )
    low, high, notes = 2.0**-reach, 2.0**reach, []
    for edge, arrow, beyond in (
        (low, "<", [p for p in parameters if p.norm_ratio < low]),
        (high, ">", [p for p in parameters if p.norm_ratio > high]),
    ):
        if beyond:
            axes.plot(
                [edge] * len(beyond),
                [place[p.parameter] for p in beyond],
                color=look.color,
                marker=arrow,
                markersize=4,
                linestyle="none",
                clip_on=False,
            )
            ends = dict.fromkeys(significant(f(p.norm_ratio for p in beyond), 2) for f in (min, max))
            notes.append(f"{arrow} " + " to ".join(ends))
    if lost := sum(math.isnan(p.norm_ratio) for p in parameters):
        notes.append(f"{lost} not a number")
    axes.annotate(
        "\n".join(notes),
        (0, 1),
        xytext=(0, 1),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=6.5,
        color=look.color,
    )
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    axes.set_xticks([0.5, 1, 2], ["½", "1", "2"])
    axes.minorticks_off()
    for tick in axes.get_xticklabels():
        tick.set_fontsize(7)


def importance_ratios(comparison: Comparison, *, steps: Sequence[int] | None = None) -> Figure:
    """Draw the distribution of policy / old probability over trained tokens.

    A row for each reference, a column for each step. Vertical lines are the clip bounds, 1 - clip_low and
    1 + clip_high.

    Args:
        comparison: what to draw.
        steps: optimizer steps; None takes up to four, the first and the last among them.
    """
    recorded = sorted({int(s) for c in comparison.configurations for s in c.ratios})
    chosen = list(steps) if steps is not None else _spread(recorded, 4)
    rows = {ref: [c for c in members if c.ratios] for ref, members in groups(comparison).items()}
    rows = {ref: members for ref, members in rows.items() if members}
    if not rows or not chosen:
        figure = style.chart(1.2)
        style.note(figure, "no importance ratios were recorded")
        return figure
    looks = series_styles(comparison)
    figure = style.chart(max(0.5 + 1.75 * len(rows), _legend_inches(rows, looks)))
    grid = figure.subplots(len(rows), len(chosen), squeeze=False, sharey="row")
    for (reference, members), line in zip(rows.items(), grid, strict=True):
        for step, axes in zip(chosen, line, strict=True):
            _histograms(axes, members, step, looks)
            first = axes is line[0]
            style.tidy(
                axes,
                title=reference if first else " ",
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
    _legend(figure, comparison, [c for members in rows.values() for c in members])
    return figure


def _histograms(axes: Axes, members: Sequence[Configuration], step: int, looks: dict[str, SeriesStyle]) -> None:
    used: list[float] = []
    for c in members:
        histogram = c.ratios.get(str(step))
        total = sum(histogram["counts"]) if histogram else 0
        if not histogram or not total:
            continue
        edges, counts = _finite_bins(histogram)
        if not any(counts):
            continue
        look, reference = looks[c.name], not c.against
        axes.stairs(
            [n / total for n in counts],
            edges,
            baseline=0,
            color=look.color,
            label=c.name,
            linewidth=5 if reference else 2.4 if c.verdict == "different" else 1.2,
            alpha=0.2 if reference else 1,
            zorder=2 if reference or c.verdict == "different" else 3,
            linestyle="-" if reference else _dash(c, _agreeing(members), look),
        )
        if not c.against or c.verdict in AGREEING:
            used += [edge for i, n in enumerate(counts) if n for edge in edges[i : i + 2]]
    loss = members[0].settings.get("loss", {})
    surrogate = loss.get("surrogate", loss)  # older records, of one surrogate, hold the bounds themselves
    for name, sign in (("clip_low", -1), ("clip_high", 1)):
        if surrogate.get("kind", "ppo") == "ppo" and math.isfinite(style.drawable(surrogate.get(name))):
            axes.axvline(1 + sign * surrogate[name], color=style.MUTED, linewidth=0.8, linestyle=(0, (1.5, 1.5)))
            used.append(1 + sign * surrogate[name])
    if used:
        room = 0.06 * (max(used) - min(used) or 1)
        axes.set_xlim(min(used) - room, max(used) + room)
    if used and min(used) > 0 and max(used) / min(used) > 8:
        axes.set_xscale("log")
        axes.set_xlim(min(used) / 1.1, max(used) * 1.1)
    low, high = axes.get_xlim()
    notes = []
    for c in members:
        histogram = c.ratios.get(str(step), {"edges": [], "counts": []})
        pairs = zip(itertools.pairwise(histogram["edges"]), histogram["counts"], strict=False)
        beyond = sum(n for (a, b), n in pairs if b <= low or a >= high or not math.isfinite(_width(a, b)))
        if beyond:
            percent = significant(100 * beyond / sum(histogram["counts"]), 2)
            notes.append(f"{percent} % of {looks[c.name].label}")
    if notes:
        axes.annotate(
            "\n".join(["beyond this axis:", *notes]),
            (0.02, 0.9),
            xycoords="axes fraction",
            va="top",
            fontsize=6,
            color=style.MUTED,
            bbox={"facecolor": "#ffffff", "linewidth": 0, "pad": 1},
        )


def _finite_bins(histogram: Mapping[str, Sequence[float]]) -> tuple[list[float], list[float]]:
    """Return edges and counts of the longest run of bins that have a place on an axis."""
    bins = list(zip(itertools.pairwise(histogram["edges"]), histogram["counts"], strict=False))
    runs = [
        list(run) for placed, run in itertools.groupby(bins, lambda item: math.isfinite(_width(*item[0]))) if placed
    ]
    longest = max(runs, key=len, default=[])
    edges = [longest[0][0][0], *(b for (_, b), _ in longest)] if longest else []
    return list(map(style.drawable, edges)), [n for _, n in longest]


def _width(low: float, high: float) -> float:
    """Return the width of a bin; NaN where one of its edges has no place on an axis."""
    return style.drawable(high) - style.drawable(low)


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
                axes.text(
                    0,
                    row,
                    f"  {state}{'not finite' if recorded else 'not recorded'}",
                    va="center",
                    fontsize=7,
                    color=style.MUTED,
                )
                continue
            middle = statistics.median(values[1:] or values)
            axes.barh(row, middle, height=0.62, color=look.color, alpha=0.25, linewidth=0)
            axes.plot(
                values, [row] * len(values), linestyle="none", marker="o", markersize=3, color=look.color, label=c.name
            )
            axes.plot(
                values[:1],
                [row],
                linestyle="none",
                marker="o",
                markersize=3,
                color=look.color,
                markerfacecolor="#ffffff",
            )
            axes.text(
                1.01,
                row,
                written(middle * unit),
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=7,
                color=style.INK,
            )
        axes.set_xlim(0, max(axes.get_xlim()[1], style.TINY))
        style.plain_ticks(axes.xaxis, 4)
    left.set_yticks(range(len(rows)), [c.name for c in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.tick_params(axis="y", colors=style.INK)
    return figure


# ---- parts that figures share -------------------------------------------------------------------------


def _lines(comparison: Comparison, key: str, title: str) -> Figure:
    """Draw one metric by step; a panel for each reference, one line for each configuration that recorded it.

    The reference is a broad pale line. Configurations that agree lie on it and on one another, so each of
    them gets its turn of one common dash: all stay visible along the same path.
    """
    panels = {
        ref: [c for c in members if any(step.get(key) is not None for step in c.steps)]
        for ref, members in groups(comparison).items()
    }
    panels = {ref: members for ref, members in panels.items() if members}
    if not panels:
        figure = style.chart(1.2)
        style.note(figure, f"{key} was not recorded")
        return figure
    looks = series_styles(comparison)
    figure = style.chart(max(0.4 + 2.6 * -(-len(panels) // style.PANELS_A_ROW), _legend_inches(panels, looks)))
    series = {
        c.name: (
            [step["step"] for step in c.steps if step.get(key) is not None],
            [step[key] for step in c.steps if step.get(key) is not None],
        )
        for members in panels.values()
        for c in members
    }
    placed = {name: list(map(style.drawable, values)) for name, (_, values) in series.items()}
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
        agreeing = _agreeing(members)
        for order, c in enumerate(members):
            look = looks[c.name]
            x, y = series[c.name][0], placed[c.name]
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
                linestyle=_dash(c, agreeing, look),
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
    _legend(figure, comparison, [c for members in panels.values() for c in members])
    return figure


def _dot(values: Sequence[float]) -> dict[str, Any]:
    """Return a mark for a line of a single point, which would be invisible."""
    return {"marker": "o", "markersize": 4} if sum(map(math.isfinite, values)) == 1 else {}


def mark_not_finite(
    axes: Axes,
    series: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    colors: Mapping[str, str],
    *,
    characters: int,
) -> list[str]:
    """Put a cross at the top edge of a panel where a line stops being finite; return lines of text that name it.

    Args:
        axes: the panel.
        series: name -> steps and values, as recorded.
        colors: name -> colour of its line.
        characters: that fit in a line of text below the panel.
    """
    lost: dict[str, list[str]] = {}
    for name, (steps, values) in series.items():
        off = {
            step: value for step, value in zip(steps, values, strict=True) if not math.isfinite(style.drawable(value))
        }
        if off:
            gone = list(off)
            what = (
                f"not finite or beyond {power_of_ten(round(math.log10(style.HUGE)))}"
                if any(map(math.isfinite, off.values()))
                else "not finite"
            )
            axes.plot(
                [gone[0]],
                [1],
                transform=axes.get_xaxis_transform(),
                color=colors[name],
                marker="x",
                markersize=5,
                markeredgewidth=1.4,
                linestyle="none",
                clip_on=False,
                gid=f"lost-{name}",
            )
            lost.setdefault(f"{what} {which_steps(gone, steps)}", []).append(name)
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


def _agreeing(members: Sequence[Configuration]) -> list[Configuration]:
    return [c for c in members if c.against and c.verdict in AGREEING]


def _dash(c: Configuration, agreeing: Sequence[Configuration], look: SeriesStyle) -> Any:
    """Return a line's own dash, or its turn of the dash that agreeing lines share."""
    if c not in agreeing or len(agreeing) == 1:
        return look.dash
    return (3.0 * agreeing.index(c), (3.0, 3.0 * (len(agreeing) - 1)))


def _legend_inches(panels: Mapping[str, Sequence[Configuration]], looks: Mapping[str, SeriesStyle]) -> float:
    """Return the least height of a figure whose legend holds every kind; matplotlib cuts one that is taller."""
    return 0.35 + 0.2 * len({looks[c.name] for members in panels.values() for c in members})


def _legend(figure: Figure, comparison: Comparison, shown: Sequence[Configuration]) -> None:
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
    figure.legend(
        handles=handles,
        loc="outside right center",
        frameon=False,
        fontsize=7.5,
        handlelength=3,
        labelspacing=0.8,
        labelcolor=style.INK,
    )


def _common_start(names: Sequence[str]) -> str:
    """Return the dash-separated parts that all names begin with."""
    parts = zip(*(name.split("-") for name in names), strict=False)
    return "-".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, parts))


def _layer(parameter: str) -> int:
    """Return the first number in a parameter's name, -1 if there is none."""
    return next((int(part) for part in parameter.split(".") if part.isdigit()), -1)


def _short(parameter: str) -> str:
    return parameter.removeprefix("model.").removesuffix(".weight")


def _wrap(name: str, width: int) -> str:
    """Wrap a long name, after - and _."""
    lines, current = [], ""
    for part in name.replace("-", "-\0").replace("_", "_\0").split("\0"):
        if current and len(current) + len(part) > width:
            lines.append(current)
            current = ""
        current += part
    return "\n".join([*lines, current])


def _spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most so many of the values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


__all__ = [
    "changed_settings",
    "gradient_norm_by_step",
    "groups",
    "importance_ratios",
    "is_bitwise_equal",
    "loss_by_step",
    "mark_not_finite",
    "norm_ratios",
    "series_styles",
    "share_of_budget",
    "time_and_memory",
    "verdicts",
    "worst_share",
]
