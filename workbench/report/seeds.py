"""Several seeds of one configuration, in the report: mean and spread, as a table and as curves."""

from __future__ import annotations

from matplotlib.figure import Figure

from workbench.compare.comparison import Comparison
from workbench.compare.seeds import SeedGroup, Spread, identical_notes, seed_groups
from workbench.report import style
from workbench.report.evidence import worst_share
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import GRADIENT_NORM, LOSS, NONE, share, significant
from workbench.report.series import mark_not_finite, recorded

CAPTION = (
    "Configurations that differ in nothing but a seed, taken together: mean ± standard deviation (n − 1) of their "
    "last steps, and the range in the brackets."
)


def seeds_by_step(comparison: Comparison) -> Figure:
    """Draw loss and gradient norm by step: the mean over seeds as a line, ± one standard deviation as a band."""
    groups = seed_groups(comparison)
    if not groups:
        return style.empty("no configuration was run with several seeds")
    hues = [style.SERIES[place % len(style.SERIES)] for place in range(len(groups))]
    colors = {c.name: hue for group, hue in zip(groups, hues, strict=True) for c in group.members}
    figure = style.chart(3.0)
    for axes, (key, title) in zip(
        figure.subplots(1, 2), ((LOSS, "loss"), (GRADIENT_NORM, "global gradient norm (L2)")), strict=True
    ):
        series = {c.name: recorded(c, key) for group in groups for c in group.members}
        lost = mark_not_finite(axes, series, colors, characters=65)
        style.tidy(axes, title=title, x="\n".join(["optimizer step", *lost]))
        for place, group in enumerate(groups):
            drawn = [{s: style.drawable(value) for s, value in series[c.name].items()} for c in group.members]
            spreads = {
                step: spread
                for step in sorted({step for values in drawn for step in values})
                if (spread := Spread.of([values.get(step) for values in drawn])).count
            }
            alike = ", identical" if group.all_identical else ""
            mean = [spread.mean for spread in spreads.values()]
            half = [spread.deviation if spread.count > 1 else 0.0 for spread in spreads.values()]
            axes.plot(
                list(spreads),
                mean,
                color=hues[place],
                marker=style.MARKERS[place % len(style.MARKERS)],
                markevery=max(1, len(mean) // 12),
                markersize=4.6,
                linewidth=1.7,
                label=f"{group.name} ({len(group.members)} seeds{alike})",
            )
            low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
            axes.fill_between(list(spreads), low, high, color=hues[place], alpha=0.18, linewidth=0)
        style.step_ticks(axes.xaxis, (step for group in groups for step in group.by_step(key)))
        style.plain_ticks(axes.yaxis)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=7.5, ncols=2)
    return figure


def seeds_table(comparison: Comparison) -> Markup:
    """Tabulate configurations of several seeds, a row each."""
    notes = [tag("p", tag("b", note, ".")) for note in identical_notes(comparison)]
    head = ["configuration", "seeds", "verdicts", "loss", "gradient norm", "worst distance ÷ budget"]
    return join([tag("p", CAPTION), notes, table(head, [_row(group) for group in seed_groups(comparison)])])


def _row(group: SeedGroup) -> list[object]:
    verdicts = [c.verdict for c in group.members]
    counts = ", ".join(f"{verdicts.count(verdict)} × {verdict}" for verdict in dict.fromkeys(verdicts))
    worst = [s for s in map(worst_share, group.members) if s is not None]
    return [
        tag("code", group.name),
        " · ".join(group.seeds),
        counts,
        _spread(group, LOSS),
        _spread(group, GRADIENT_NORM),
        share(max(worst)) if worst else NONE,
    ]


def _spread(group: SeedGroup, key: str) -> str:
    """Return the spread of a metric in the last step; of identical runs the value alone: one draw has no spread."""
    ends = [c.steps[-1][key] for c in group.members if c.steps and c.steps[-1].get(key) is not None]
    last = Spread.of(ends)
    if last.count and group.all_identical:
        return f"{significant(last.mean)} (identical runs)"
    lost = len(ends) - last.count
    if not lost:
        return spread_text(last)
    return f"{spread_text(last)}, {lost} not finite" if last.count else "not finite"


def spread_text(spread: Spread) -> str:
    """Format mean ± deviation and the range, in one line.

    Example:
        >>> spread_text(Spread.of([1.0, 2.0, 3.0]))
        '2.00 ± 1.00 [1.00, 3.00]'
    """
    if not spread.count:
        return NONE
    if spread.count == 1:
        return f"{significant(spread.mean)} (one seed)"
    ends = f"[{significant(spread.low)}, {significant(spread.high)}]"
    return f"{significant(spread.mean)} ± {significant(spread.deviation)} {ends}"
