"""Online runs by optimizer step: reward, completions, mismatch of sampler and trainer, training.

The same figure serves a finished comparison and runs in progress. Reward is noisy, because every sampling has other
prompts: each run is drawn thin, as it was recorded, and the broad line is the mean over seeds and over a window of
steps, whose length is in the legend.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workbench.compare.comparison import Comparison, Configuration
from workbench.compare.seeds import Spread, seed_groups
from workbench.records.directory import RunDirectory
from workbench.report import style
from workbench.report.figures import STEP_MS
from workbench.report.markup import Markup, table, tag
from workbench.report.numbers import GRADIENT_NORM, LOSS, NONE, significant
from workbench.report.seeds import spread_text
from workbench.report.series import mark_not_finite, recorded

RIGHT, MISMATCH = "reward/right/fraction", "kl/policy_sampler/k3_mean"
DURATIONS = ("time/sample_ms", "time/score_ms", STEP_MS)
"""Durations of an optimizer step and of the sampling before it; a step that samples nothing has only the last."""


@dataclass(frozen=True)
class Panel:
    """One small panel: a key of the step records, and its unit with the better direction if there is one."""

    key: str
    title: str
    unit: str
    logarithmic: bool = False


PANELS = (
    Panel("reward/all/mean", "reward", "mean of completions, up is better"),
    Panel(RIGHT, "right completions", "share of completions, up is better"),
    Panel("length/answer/mean", "completion length", "mean, tokens"),
    Panel("length/truncated/fraction", "completions cut off", "share of completions, down is better"),
    Panel(MISMATCH, "sampler and trainer apart", "KL, k3, nats a token, logarithmic, down", logarithmic=True),
    Panel("entropy/policy/mean", "entropy", "of the policy, nats a token"),
    Panel(LOSS, "loss", "of the optimizer step"),
    Panel(GRADIENT_NORM, "gradient norm", "L2, before clipping"),
)
CAPTION = (
    "By optimizer step. Rewards are those of the completions that the step trains on, scored before it does. Up is "
    "better for reward and right completions, down for completions cut off; length, entropy and norms have no better "
    "side, and the loss of a policy gradient says nothing of progress. Apart: log-probabilities of the trainer against "
    "those of the sampler, as k3 on the sampler's tokens, mean over those trained, which is KL(policy ‖ sampler) while "
    "the two are close; 0 would be no mismatch."
)

Runs = Comparison | RunDirectory | Iterable[RunDirectory]


def online_curves(runs: Runs) -> Figure:
    """Draw reward, completions, mismatch, entropy, loss and gradient norm of online runs by optimizer step.

    Configurations that differ in nothing but a seed share a broad line: their mean, over a tenth of the steps. Runs
    that sampled nothing, have no step yet or did not record a metric are named, not left out silently.
    """
    comparison = _comparison(runs)
    lines = online_groups(comparison)
    if not lines:
        return style.empty("no run here samples its own rollouts (online.task)")
    width = max(len(c.steps) for members in lines.values() for c in members) // 10 | 1  # odd: as many before as after
    figure = style.chart(4.4)
    for panel, axes in zip(PANELS, figure.subplots(2, len(PANELS) // 2).flatten(), strict=True):
        style.tidy(
            axes, title=panel.title, y=panel.unit, x="optimizer step" if axes.get_subplotspec().is_last_row() else ""
        )
        _draw(axes, panel, lines, width)
    _legend(figure, lines, width, [c.name for c in comparison.configurations if not _samples(c)])
    return figure


def online_groups(comparison: Comparison) -> dict[str, list[Configuration]]:
    """Group the configurations that sample their own rollouts by the name of a line; seeds of one share a line.

    Runs of which one is compared with another get a line each.
    """
    online = [c for c in comparison.configurations if _samples(c)]
    lines: dict[str, list[Configuration]] = {}
    for group in seed_groups(Comparison(comparison.experiment, comparison.question, online)):
        if not {c.against for c in group.members} & {c.name for c in group.members}:
            lines[group.name if group.name not in lines else group.members[0].name] = list(group.members)
    grouped = {c.name for members in lines.values() for c in members}
    lines |= {c.name: [c] for c in online if c.name not in grouped}
    order = [c.name for c in online]
    return dict(sorted(lines.items(), key=lambda line: order.index(line[1][0].name)))


def online_answer(comparison: Comparison) -> str:
    """Return the share of right completions, a sentence for each line without a reference; "" without lines."""
    sentences = []
    for name, members in online_groups(comparison).items():
        (first, last), ran = _ends(members), [c for c in members if c.steps]
        if first.count and not any(c.against for c in members):
            seeds = f", mean of {len(ran)} seeds" if len(ran) > 1 else ""
            sentences.append(
                f"{name}: {100 * first.mean:.0f} % of the completions right in the first tenth of the steps, "
                f"{100 * last.mean:.0f} % in the last{seeds}."
            )
    return " ".join(sentences)


def online_table(comparison: Comparison) -> Markup:
    """Build a row for each line of the figure: its begin, its end, and the worst mismatch."""
    right = [f"right completions, {which} tenth" for which in ("first", "last")]
    head = ["configuration", "seeds", "steps", *right, "largest mismatch, nats", "a step"]
    rows = [_row(name, members) for name, members in online_groups(comparison).items()]
    return table(head, rows, numbers=(1, 2, 5, 6))


# ---- parts -----------------------------------------------------------------------------------------------


def _comparison(runs: Runs) -> Comparison:
    """Return runs as a comparison's configurations, as far as they are recorded by now."""
    if isinstance(runs, Comparison):
        return runs
    directories = [runs] if isinstance(runs, RunDirectory) else list(runs)
    names = [run.name for run in directories]
    configurations = []
    for run in directories:
        name = run.name if names.count(run.name) == 1 else run.path.name
        settings = run.spec.model_dump(mode="json")
        configurations.append(Configuration(name, settings, state=run.status, steps=run.steps()))
    return Comparison("", "", configurations)


def _samples(c: Configuration) -> bool:
    return (c.settings.get("online") or {}).get("task") is not None


def _draw(axes: Axes, panel: Panel, lines: Mapping[str, Sequence[Configuration]], width: int) -> None:
    missing: list[str] = []
    drawn: list[float] = []
    raw: dict[str, dict[int, float]] = {}
    colors: dict[str, str] = {}
    looks = style.line_styles(list(lines))
    for line, members in lines.items():
        color = looks[line]["color"]
        series = {c.name: _values(c, panel.key) for c in members}
        raw |= {c.name: recorded(c, panel.key) for c in members}
        colors |= dict.fromkeys(series, color)
        missing += [c.name for c in members if c.steps and not raw[c.name]]
        for name, values in series.items():
            point: dict[str, Any] = {"marker": "o" if len(values) == 1 else "", "markersize": 3}
            axes.plot(*_xy(values), color=color, linewidth=0.7, alpha=0.45, gid=f"run-{name}", **point)
            drawn += values.values()
        axes.plot(*_xy(smooth(series.values(), width)), linewidth=1.8, gid="mean", **looks[line])
    lost = mark_not_finite(axes, raw, colors, characters=34)
    if lost:
        axes.set_xlabel("\n".join(filter(None, [axes.get_xlabel(), *lost])), loc="left")
    if missing:
        style.remark(axes, "\n".join(["not recorded:", *missing]), (0.02, 0.04), fontsize=6.5, va="bottom")
    if not drawn:
        axes.set_yticks([])
    elif panel.logarithmic and min(drawn) > 0:
        axes.set_yscale("log")
        axes.set_ylim(10.0 ** math.floor(math.log10(min(drawn))), 10.0 ** math.ceil(math.log10(max(drawn)) + 1e-9))
        style.log_ticks(axes.yaxis)
    else:
        style.plain_ticks(axes.yaxis)
    style.step_ticks(axes.xaxis, (record["step"] for members in lines.values() for c in members for record in c.steps))


def _values(c: Configuration, key: str) -> dict[int, float]:
    """Return step -> value, without values that have no place on an axis."""
    placed = {step: style.drawable(value) for step, value in recorded(c, key).items()}
    return {step: value for step, value in placed.items() if math.isfinite(value)}


def _xy(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())


def smooth(runs: Iterable[Mapping[int, float]], width: int) -> dict[int, float]:
    """Average over runs, then over a centred window of steps; steps without a full window are left out.

    Args:
        runs: step -> value of each run.
        width: width of the window, odd.

    Example:
        >>> smooth([{0: 1.0, 1: 2.0, 2: 5.0}, {0: 3.0, 1: 2.0, 2: 5.0}], 3)
        {1: 3.0}
    """
    series = [dict(values) for values in runs]
    steps = sorted({step for values in series for step in values})
    mean = [statistics.fmean(values[step] for values in series if step in values) for step in steps]
    reach = width // 2
    return {steps[at]: statistics.fmean(mean[at - reach : at + reach + 1]) for at in range(reach, len(steps) - reach)}


def _legend(figure: Figure, lines: Mapping[str, Sequence[Configuration]], width: int, others: Sequence[str]) -> None:
    looks = style.line_styles(list(lines))
    handles = [
        Line2D([], [], linewidth=1.8, label=_label(name, members), **looks[name]) for name, members in lines.items()
    ]
    how = "thin: each run as recorded" + (f"; broad: mean of seeds and of {width} steps" if width > 1 else "")
    handles.append(Line2D([], [], linestyle="none", label=how))
    if others:
        handles.append(Line2D([], [], linestyle="none", label=f"samples nothing, not shown: {', '.join(others)}"))
    style.legend(figure, handles, "outside upper left", ncols=min(4, len(handles)))


def _label(name: str, members: Sequence[Configuration]) -> str:
    notes = [f"{len(members)} seeds"] if len(members) > 1 else []
    empty = [c for c in members if not c.steps]
    for state in dict.fromkeys(c.state for c in empty):
        which = [c.name for c in empty if c.state == state]
        whose = "" if len(members) == 1 else f" ({', '.join(which)})"
        notes.append(f"no step recorded, {state}{whose}")
    return f"{name}{': ' if notes else ''}{', '.join(notes)}"


def _row(name: str, members: Sequence[Configuration]) -> list[Any]:
    records = [record for c in members for record in c.steps]
    first, last = _ends(members)
    apart = [record[MISMATCH] for record in records if record.get(MISMATCH) is not None]
    farthest = max(apart, key=lambda value: value if math.isfinite(value) else math.inf, default=None)
    took = [sum(record.get(key, 0.0) for key in DURATIONS) / 1e3 for record in records if STEP_MS in record]
    return [
        tag("code", name),
        len(members),
        " · ".join(dict.fromkeys(str(len(c.steps)) for c in members)),
        spread_text(first),
        spread_text(last),
        significant(farthest, 2),
        f"{significant(statistics.median(took), 2)} s" if took else NONE,
    ]


def _ends(members: Sequence[Configuration]) -> tuple[Spread, Spread]:
    """Return the share of right completions in the first and in the last tenth of each run's steps, over runs."""
    series = [list(values.values()) for c in members if (values := _values(c, RIGHT))]
    first = [statistics.fmean(values[: max(1, len(values) // 10)]) for values in series]
    last = [statistics.fmean(values[-max(1, len(values) // 10) :]) for values in series]
    return Spread.of(first), Spread.of(last)
