"""Trials as markup and as text: a row or a line for each, the same in a live panel and in a static page.

A state is shown by a sign and a word; its hue only repeats them. Colours are JupyterLab's own variables, so rows read
well in its light and dark themes, with a fallback for pages that have no such theme.

A sparkline is a series in the space of a word, as inline SVG and as text. It is scaled to the finite values. A value
that is not finite is a gap with a cross in it, so that a run that diverges does not look like a constant one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from workbench.records.states import STATES
from workbench.report.markup import Markup, breakable, style_sheet, tag
from workbench.report.numbers import NONE, duration, significant
from workbench.report.trial import GONE, Trial

SIGNS = {"pending": "…", "running": "▸", "succeeded": "✓", "failed": "✕", "cancelled": "⊘", "lost": "?", GONE: "−"}
"""State -> its sign, which needs no hue."""

WIDTH, HEIGHT = 80.0, 20.0
"""Size of the drawing, in its own units (pixels at its natural size)."""

_EDGE = 2.0  # room for the line's own width and for the crosses
_BLOCKS = "▁▂▃▄▅▆▇█"


def chip(state: str) -> Markup:
    """Return a state as a small label: sign, word, hue."""
    known = state if state in SIGNS else GONE
    return tag("span", tag("span", SIGNS[known], class_="sign", aria_hidden="true"), " ", state, class_=f"chip {known}")


def heading(what: str, trials: Sequence[Trial], elapsed_s: float | None) -> Markup:
    """Return the heading of trials: their experiment, the number in each state, and the elapsed time."""
    count = Counter(trial.state for trial in trials)
    states = [tag("span", chip(state), f" {count[state]}") for state in (*STATES, GONE) if count[state]]
    return tag(
        "div",
        tag("strong", what),
        tag("span", states, class_="tally"),
        tag("span", duration(elapsed_s), class_="elapsed", title="since the launch"),
        tag("span", shared_place(trials), class_="elapsed"),
        class_="heading",
    )


def shared_place(trials: Sequence[Trial]) -> str:
    """Return where all of them run if that is not the requested place, for the heading; "" if they differ."""
    places = {trial.place for trial in trials}
    return places.pop() if len(trials) > 1 and len(places) == 1 else ""


def column_heads() -> Markup:
    """Return the heads of the columns of `row`."""
    heads = ("trial", "state", "steps", "loss", "gradient norm", "time")
    return tag("div", [tag("span", head) for head in heads], class_="trial heads")


def row(trial: Trial, *, heading_place: str = "") -> Markup:
    """Return one trial: name, state, progress, loss and gradient norm, time; notes, but what the heading names."""
    reward = f"reward {sparkline_text(trial.reward)} {last(trial.reward)}" if trial.reward else ""
    place = "" if trial.place == heading_place else trial.place
    note = "; ".join(filter(None, [reward, left(trial), trial.note, place]))
    ranks = f"{trial.ranks} rank{'s' if trial.ranks > 1 else ''}"
    per_cent = 100 * min(1.0, trial.steps_done / max(1, trial.steps))
    bar = tag(
        "span",
        tag("i", class_=f"done {trial.state}", style=f"width:{per_cent:.4g}%"),
        class_="progress",
        role="progressbar",
        aria_valuemin="0",
        aria_valuemax=str(trial.steps),
        aria_valuenow=str(trial.steps_done),
        aria_label=f"steps of {trial.name}",
    )
    return tag(
        "div",
        tag("span", tag("b", breakable(trial.name)), " ", tag("small", ranks), title=trial.folder),
        tag("span", chip(trial.state)),
        tag("span", bar, tag("span", f"{trial.steps_done}/{trial.steps}", class_="count")),
        _series("loss", trial.loss),
        _series("gradient norm", trial.gradient_norm),
        tag("span", duration(trial.seconds), class_="time"),
        tag("span", note, class_="note") if note else None,
        class_="trial",
        role="group",
        aria_label=f"{trial.name}: {trial.state}",
    )


def table_of(
    what: str, trials: Iterable[Trial], elapsed_s: float | None = None, *, more: Markup | None = None
) -> Markup:
    """Return trials as static markup: heading, rows, and further markup below them."""
    shown = list(trials)
    place = shared_place(shown)
    rows = [row(trial, heading_place=place) for trial in shown]
    style = tag("style", style_sheet("live.css"))
    return tag("div", style, heading(what, shown, elapsed_s), column_heads(), rows, more, class_="workbench-live")


def _series(label: str, values: Sequence[float | None]) -> Markup:
    drawn = [sparkline(values, label=label), tag("span", last(values), class_="value")] if values else None
    return tag("span", drawn, class_="series")


# ---- text --------------------------------------------------------------------------------------------------


def as_line(trial: Trial, *, names: int = 0) -> str:
    """Format one trial as a line of text; names of one minimum width align lines.

    Example:
        >>> as_line(Trial("cp2", "cp2-0badcafe", "running", 2, 4, 2, (0.5, 0.25), (1.0, 2.0), 3.0))
        'cp2  running    2/4 steps  3 s     loss █▁ 0.250  gradient norm ▁█ 2.00'
    """
    cells = [
        f"{trial.name:<{names}}",
        f"{trial.state:<9}",
        f"{trial.steps_done}/{trial.steps} steps",
        f"{duration(trial.seconds):<6}",
    ]
    for label, values in (("loss", trial.loss), ("gradient norm", trial.gradient_norm), ("reward", trial.reward)):
        if values:
            cells.append(f"{label} {sparkline_text(values)} {last(values)}")
    return "  ".join(filter(None, [*cells, left(trial), trial.note])).rstrip()


def left(trial: Trial) -> str:
    """Format the estimated time left, "" if unknown.

    Example:
        >>> left(Trial("cp2", "cp2-0badcafe", "running", 2, 4, 2, seconds_left=75.0))
        '1 min 15 s left'
    """
    return "" if trial.seconds_left is None else f"{duration(trial.seconds_left)} left"


def last(values: Sequence[float | None]) -> str:
    """Format the last value, in few digits."""
    return significant(values[-1]) if values else NONE


# ---- sparklines --------------------------------------------------------------------------------------------


def sparkline(values: Iterable[float | None], *, label: str) -> Markup:
    """Draw the series as an SVG element in the colour of the text around it; None, NaN and infinities are crosses."""
    series = [math.nan if value is None else float(value) for value in values]
    description = f"{label}: {summary(series)}"
    return tag(
        "svg",
        tag("title", description),
        _lines(_thinned(series)),
        class_="sparkline",
        role="img",
        aria_label=description,
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        width=f"{WIDTH:g}",
        height=f"{HEIGHT:g}",
    )


def sparkline_text(values: Iterable[float | None], *, width: int = 12) -> str:
    """Draw the last values as one character each.

    Example:
        >>> sparkline_text([1.0, 3.0, float("nan"), 2.0])
        '▁█×▅'
    """
    series = [math.nan if value is None else float(value) for value in values][-width:]
    place = _scale(series)
    return "".join(
        _BLOCKS[round(place(value) * (len(_BLOCKS) - 1))] if math.isfinite(value) else "×" for value in series
    )


def summary(values: Sequence[float]) -> str:
    """Describe a series: number of values, the last one, the range of the finite ones, and the number of others.

    Example:
        >>> summary([1.0, float("nan"), 2.0])
        '3 values, last 2.00, from 1.00 to 2.00, 1 not finite'
    """
    if not values:
        return "no values yet"
    parts = [f"{len(values)} value{'s' if len(values) > 1 else ''}", f"last {significant(values[-1])}"]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) > 1:
        parts.append(f"from {significant(min(finite))} to {significant(max(finite))}")
    if lost := len(values) - len(finite):
        parts.append(f"{lost} not finite")
    return ", ".join(parts)


def _lines(points: Sequence[tuple[float, float]]) -> list[Markup]:
    """Draw lines through finite neighbours, a dot for an isolated value, and a cross for one that is not finite."""
    place = _scale([value for _, value in points])
    pieces: list[list[tuple[str, str]]] = [[]]
    crosses = []
    for across, value in points:
        x = _EDGE + across * (WIDTH - 2 * _EDGE)
        if math.isfinite(value):
            pieces[-1].append((f"{x:.1f}", f"{HEIGHT - _EDGE - place(value) * (HEIGHT - 2 * _EDGE):.1f}"))
        else:
            crosses.append(f"M{x - 2:.1f} {HEIGHT / 2 - 2:.1f}l4 4m0 -4l-4 4")
            pieces.append([])
    stroke = {"fill": "none", "stroke": "currentColor"}
    drawn = [
        tag("polyline", points=" ".join(map(",".join, piece)), **stroke, stroke_width="1.3", stroke_linejoin="round")
        for piece in pieces
        if len(piece) > 1
    ]
    ends = [piece[0] for piece in pieces if len(piece) == 1]
    if len(pieces[-1]) > 1:
        ends.append(pieces[-1][-1])
    dots = [tag("circle", cx=x, cy=y, r="1.8", fill="currentColor") for x, y in ends]
    return [*drawn, *dots, *([tag("path", d="".join(crosses), **stroke, class_="lost")] if crosses else [])]


def _thinned(series: Sequence[float]) -> list[tuple[float, float]]:
    """Return (share of the width, value) of at most 200 points: per bucket the lowest, the highest and a lost one.

    A spike of one step stays visible however long the series is, and so does a value that is not finite.
    """
    indices: Iterable[int] = range(len(series))
    if len(series) > 2 * WIDTH:
        chosen, buckets = {0, len(series) - 1}, int(WIDTH / 2)
        for bucket in range(buckets):
            inside = range(bucket * len(series) // buckets, (bucket + 1) * len(series) // buckets)
            finite = [index for index in inside if math.isfinite(series[index])]
            chosen.update([index for index in inside if not math.isfinite(series[index])][:1])
            if finite:
                chosen.update((min(finite, key=series.__getitem__), max(finite, key=series.__getitem__)))
        indices = sorted(chosen)
    return [(index / max(len(series) - 1, 1), series[index]) for index in indices]


def _scale(series: Sequence[float]) -> Callable[[float], float]:
    finite = [value for value in series if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def place(value: float) -> float:
        # halved first: the range of two finite numbers need not be finite
        span = high / 2 - low / 2
        return 0.5 if span == 0 else (value / 2 - low / 2) / span

    return place
