"""Trials as markup: a row for each, the same in a live panel and in a static page.

A state is shown by a sign and a word; its hue only repeats them. Colours are JupyterLab's own variables, so rows read
well in its light and dark themes, with a fallback for pages that have no such theme.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from workbench.records.directory import STATES
from workbench.report.markup import Markup, breakable, tag
from workbench.report.sparkline import sparkline, sparkline_text
from workbench.report.trial import GONE, Trial, duration, last, left

STYLE_SHEET = Path(__file__).with_name("live.css")

SIGNS = {"pending": "…", "running": "▸", "succeeded": "✓", "failed": "✕", "cancelled": "⊘", "lost": "?", GONE: "−"}
"""State -> its sign, which needs no hue."""


def live_style() -> Markup:
    """Return the style sheet of this module; it applies only inside elements of class ``workbench-live``."""
    return Markup(STYLE_SHEET.read_text(encoding="utf8"))


def chip(state: str) -> Markup:
    """Return a state as a small label: sign, word, hue."""
    known = state if state in SIGNS else GONE
    return tag("span", tag("span", SIGNS[known], class_="sign", aria_hidden="true"), " ", state, class_=f"chip {known}")


def heading(what: str, trials: Sequence[Trial], elapsed_s: float | None) -> Markup:
    """Return the heading of trials: their experiment, the number in each state, and the elapsed time."""
    count = Counter(trial.state for trial in trials)
    order = [*STATES, GONE]
    states = [tag("span", chip(state), f" {count[state]}") for state in order if count[state]]
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
    """Return one trial: name, state, progress, loss and gradient norm, time, and notes below them.

    Args:
        trial: trial to draw.
        heading_place: the place that the heading names already.
    """
    reward = f"reward {sparkline_text(trial.reward)} {last(trial.reward)}" if trial.reward else ""
    note = "; ".join(
        filter(None, [reward, left(trial), trial.note, trial.place if trial.place != heading_place else ""])
    )
    ranks = f"{trial.ranks} rank{'s' if trial.ranks > 1 else ''}"
    bar = tag(
        "span",
        tag("i", class_=f"done {trial.state}", style=f"width:{_per_cent(trial):.4g}%"),
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
    said_once = shared_place(shown)
    return tag(
        "div",
        tag("style", live_style()),
        heading(what, shown, elapsed_s),
        column_heads(),
        [row(trial, heading_place=said_once) for trial in shown],
        more,
        class_="workbench-live",
    )


def _series(label: str, values: Sequence[float | None]) -> Markup:
    drawn = [sparkline(values, label=label), tag("span", last(values), class_="value")] if values else None
    return tag("span", drawn, class_="series")


def _per_cent(trial: Trial) -> float:
    return 100 * min(1.0, trial.steps_done / max(1, trial.steps))
