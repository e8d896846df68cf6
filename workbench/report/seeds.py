"""Several seeds of one configuration, in the report: mean and spread, as a table and as curves."""

from __future__ import annotations

from matplotlib.figure import Figure

from workbench.compare.comparison import Comparison
from workbench.compare.seeds import SeedGroup, Spread, seed_groups
from workbench.report import style
from workbench.report.figures import GRADIENT_NORM, LOSS, worst_share
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import NONE, share, significant

SAID = ("Configurations that differ in nothing but a seed, taken together: mean ± standard deviation (n − 1) of their "
        "last steps, and the range in the brackets.")

NOTHING_DRAWN = ("The seed changes nothing in these runs: the same documents in the same order, no dropout, the same "
                 "weights. `model.seed` draws the weights of tiny models.")


def seeds_by_step(comparison: Comparison) -> Figure:
    """Loss and gradient norm by step: the mean over seeds as a line, one standard deviation to each side as a band."""
    found = seed_groups(comparison)
    if not found:
        figure = style.chart(1.2)
        style.note(figure, "no configuration was run with several seeds")
        return figure
    figure = style.chart(3.0)
    for axes, (key, title) in zip(figure.subplots(1, 2), ((LOSS, "loss"), (GRADIENT_NORM, "global gradient norm (L2)")),
                                  strict=True):
        style.tidy(axes, title=title, x="optimizer step")
        for place, group in enumerate(found):
            spreads = {step: spread for step, spread in group.by_step(key).items() if spread.count}
            if not spreads:
                continue
            color = style.SERIES[place % len(style.SERIES)]
            mean = [spread.mean for spread in spreads.values()]
            half = [spread.deviation if spread.count > 1 else 0.0 for spread in spreads.values()]
            axes.plot(list(spreads), mean, color=color, marker=style.MARKERS[place % len(style.MARKERS)],
                      markevery=max(1, len(mean) // 12), markersize=4.6, linewidth=1.7,
                      label=f"{group.name} ({len(group.members)} seeds)")
            axes.fill_between(list(spreads), [m - h for m, h in zip(mean, half, strict=True)],
                              [m + h for m, h in zip(mean, half, strict=True)], color=color, alpha=0.18, linewidth=0)
        style.step_ticks(axes.xaxis, (step for group in found for step in group.by_step(key)))
        style.plain_ticks(axes.yaxis)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=7.5, ncols=2)
    return figure


def seeds_table(comparison: Comparison) -> Markup:
    """A row for each configuration of several seeds."""
    alike = all(_last(group, key).deviation == 0 for group in seed_groups(comparison) for key in (LOSS, GRADIENT_NORM))
    return join([tag("p", SAID), tag("p", tag("b", NOTHING_DRAWN)) if alike else None, table(
        ["configuration", "seeds", "verdicts", "loss", "gradient norm", "worst distance ÷ budget"],
        [_row(group) for group in seed_groups(comparison)])])


def _row(group: SeedGroup) -> list[object]:
    verdicts = [c.verdict for c in group.members]
    said = ", ".join(f"{verdicts.count(verdict)} × {verdict}" for verdict in dict.fromkeys(verdicts))
    worst = [s for s in map(worst_share, group.members) if s is not None]
    return [tag("code", group.name), " · ".join(group.seeds), said, spread_text(_last(group, LOSS)),
            spread_text(_last(group, GRADIENT_NORM)), share(max(worst)) if worst else NONE]


def _last(group: SeedGroup, key: str) -> Spread:
    return Spread.of([c.steps[-1].get(key) for c in group.members if c.steps])


def spread_text(spread: Spread) -> str:
    """Mean ± deviation and the range, in one line.

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
