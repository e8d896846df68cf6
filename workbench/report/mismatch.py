"""The page of an attribution, and its parts over training steps.

The same attribution gives the same bytes. Figures have no other input than the attributions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from workbench.atomic import write_whole
from workbench.mismatch.verdict import SEEDED, Attribution, Part
from workbench.report import style
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import significant
from workbench.report.page import document, drawing

QUESTION = "Where does the gap between trainer and sampler come from, and how much of it is safe?"
WHAT = (
    "The gap of a token is the trainer's log-probability minus the one that the sampler recorded. Each part is what "
    "one factor does when it alone is switched from the trainer's value to the sampler's; interactions are what they "
    "do together beyond the sum; the rest is what none explains. A cause was found if the recorded values come out "
    "under it, token by token; a difference that the settings state is no cause."
)
PARTS_CAPTION = (
    "Mean distance from 0 of each part, in nats a token, on a logarithmic axis. Line: the floor's mean. Filled: found; "
    "hollow: stated by the settings, or what is left. A value of 0 is written as such."
)
STEPS_CAPTION = (
    "Mean distance from 0 by training step, in nats a token, on a logarithmic axis. Grey: the largest rest that "
    "rounding alone makes of a batch of that step. Cross: a step whose rest raises an alarm."
)


def write_page(result: Attribution, path: Path, *, title: str = "attribution") -> Path:
    """Write the page of one attribution atomically, and return its path."""
    return write_whole(Path(path), page(result, title=title).encode(errors="backslashreplace"))


def page(result: Attribution, *, title: str = "attribution", more: Mapping[str, Markup] | None = None) -> str:
    """Return the page as text; ``more`` are further sections."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", title), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(result), class_="answer"),
    )
    sections = [
        ("Parts", join([tag("p", WHAT), drawing("gap_parts", PARTS_CAPTION, gap_parts(result)), parts_table(result)])),
        ("How much is safe", floor_section(result)),
        ("What this record cannot decide", undecided_section(result)),
        *((more or {}).items()),
    ]
    return document(title, [masthead], sections)


def answer(result: Attribution) -> str:
    """Summarize an attribution in sentences."""
    whole, left = (significant(one["mean_distance"], 2) for one in (result.gap, result.rest))
    found = ", ".join(f"{part.factor} ({part.description})" for part in result.causes)
    return (
        f"The gap is {whole} nats a token in the mean. "
        + (f"Found: {found}. " if found else "No cause was found that the settings do not state. ")
        + f"The rest is {left} nats a token; rounding alone makes {significant(result.floor['mean'], 2)}. "
        + (f"It raises an alarm: {', '.join(result.alarms)}." if result.alarms else "It raises no alarm.")
    )


def gap_parts(result: Attribution) -> Figure:
    """Draw the size of each part, the interactions, the rest and the floor."""
    rows: list[tuple[str, float, bool]] = [(part.factor, part.mean_distance, not part.stated) for part in result.parts]
    rows += [("interactions", result.interactions, False), ("rest", result.rest["mean_distance"], False)]
    figure = style.chart(0.9 + 0.24 * len(rows))
    axes = figure.subplots()
    style.tidy(axes, x="mean distance from 0, nats a token (logarithmic)", grid="x")
    drawn = [value for _, value, _ in rows if value > 0] + [result.floor["mean"] or 1e-9]
    least = min(drawn) / 3
    for place, (_, value, found) in enumerate(rows):
        color = style.SERIES[2] if found else style.MUTED
        if value > 0:
            axes.plot([value], [place], "D" if found else "o", color=color, markerfacecolor=color if found else "none")
        else:
            style.remark(axes, "0", (least, place), offset=(0, -3), fontsize=7.5)
    axes.set_xscale("log")
    axes.set_xlim(least, max(drawn) * 3)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    if result.floor["mean"]:
        axes.axvline(result.floor["mean"], color=style.INK, linewidth=0.9)
    style.log_ticks(axes.xaxis)
    return figure


def parts_table(result: Attribution) -> Markup:
    """Table of parts, interactions and rest."""
    rows = [
        [
            part.factor,
            "stated" if part.stated else f"found ({part.side})",
            significant(part.mean_distance, 3),
            significant(part.mean, 2),
            significant(part.largest, 3),
            _description(part),
        ]
        for part in result.parts
    ]
    rows.append(
        ["interactions", "", significant(result.interactions, 3), "", "", "together, beyond the sum of each alone"]
    )
    rest = result.rest
    rows.append(
        [
            "rest",
            "",
            significant(rest["mean_distance"], 3),
            significant(rest["mean"], 2),
            significant(rest["largest"], 3),
            "no part explains it",
        ]
    )
    head = ["part", "", "mean |nats|", "mean", "largest", "switched alone"]
    return join([table(head, rows, numbers=range(2, 5)), tag("p", result.evidence, ".")])


def floor_section(result: Attribution) -> Markup:
    """The floor, the thresholds from it, and what they do not say."""
    if not result.safe:
        return tag("p", "No floor was measured.")
    measured = [
        ["mean distance", significant(result.floor["mean"], 3)],
        ["root mean square", significant(result.floor["rms"], 3)],
        ["99 of 100 tokens below", significant(result.floor["p99"], 3)],
        ["of the trainer alone, root mean square", significant(result.floor["trainer_rms"], 3)],
        ["of the sampler alone, root mean square", significant(result.floor["sampler_rms"], 3)],
    ]
    thresholds = [
        [name, significant(value, 3), "alarm" if name in result.alarms else "no alarm"]
        for name, value in result.safe.items()
    ]
    return join(
        [
            tag(
                "p",
                "Rounding alone, drawn around the float64 ground truth of both sides, for this model, these precisions "
                f"and these lengths: {result.floor['draws']} draws of {result.floor['tokens']} tokens, in nats.",
            ),
            table(["noise", "nats"], measured, numbers=[1]),
            tag("p", "Safe: a batch's rest up to these thresholds needs no cause but rounding."),
            table(["statistic of the rest", "safe up to, nats", "here"], thresholds, numbers=[1]),
            tag("p", tag("b", SEEDED)),
        ]
    )


def undecided_section(result: Attribution) -> Markup:
    """Rivals, and factors that could not be switched."""
    sentences = [
        f"{part.factor} cannot be told from {' or '.join(part.rivals)}; record {part.record}."
        for part in result.parts
        if part.rivals
    ]
    sentences += [f"{sentence}." for sentence in result.undecided]
    return tag("ul", [tag("li", one) for one in sentences]) if sentences else tag("p", "Nothing.")


def over_steps(history: Mapping[int, Attribution]) -> Figure:
    """Draw gap, parts, rest and floor by training step, and mark the steps whose rest raises an alarm."""
    if not history:
        return style.empty("no step was attributed")
    steps = sorted(history)
    names = list(dict.fromkeys(part.factor for step in steps for part in history[step].parts))
    figure = style.chart(3.4)
    axes = figure.subplots()
    style.tidy(axes, x="training step", y="mean distance from 0, nats a token (logarithmic)")
    safe = [history[step].safe.get("mean", float("nan")) for step in steps]
    positive = [value for value in safe if value > 0]
    axes.fill_between(
        steps, [min(positive, default=1e-9) / 30] * len(steps), safe, color=style.LINE, label="safe", linewidth=0
    )
    axes.plot(
        steps, [history[step].gap["mean_distance"] for step in steps], color=style.INK, label="gap", linewidth=1.6
    )
    for number, name in enumerate(names):
        of_step = {step: {part.factor: part.mean_distance for part in history[step].parts} for step in steps}
        values = [of_step[step].get(name) or float("nan") for step in steps]
        axes.plot(
            steps,
            values,
            label=name,
            color=style.SERIES[number % len(style.SERIES)],
            marker=style.MARKERS[number % len(style.MARKERS)],
            markersize=3.5,
            linewidth=1.2,
        )
    rest = {step: history[step].rest["mean_distance"] or float("nan") for step in steps}
    axes.plot(steps, list(rest.values()), color=style.MUTED, linestyle=style.DASHES[1], label="rest", linewidth=1.2)
    alarmed = [step for step in steps if history[step].alarms]
    axes.plot(alarmed, [rest[step] for step in alarmed], "x", color=style.SERIES[2], label="alarm", markersize=7)
    axes.set_yscale("log")
    style.log_ticks(axes.yaxis)
    style.step_ticks(axes.xaxis, steps)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=7.5, labelcolor=style.INK)
    return figure


def _description(part: Part) -> str:
    return part.description + ("" if part.documents is None else f", in {part.documents} documents")
