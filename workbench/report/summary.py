"""The verdicts at a glance: the head of the report page, and the output of `show` in a notebook."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from workbench.compare.comparison import Comparison, Configuration, layout_of
from workbench.compare.seeds import identical_notes
from workbench.report.evidence import (
    AGREEING,
    could_have_seen,
    declaration,
    differing_settings,
    diverged_step,
    divergence,
    groups,
    is_bitwise_equal,
    relative_error,
    relative_text,
    warnings,
    worst_share,
)
from workbench.report.markup import Markup, breakable, join, tag
from workbench.report.numbers import NONE, near_one, power_of_ten, share
from workbench.report.style import VERDICT_STYLES

STYLE_SHEET = Path(__file__).with_name("verdicts.css")
COLUMNS = 6
"""Columns of the summary."""


def show(comparison: Comparison) -> None:
    """Show the verdicts: HTML in a notebook, and the same as plain text in a terminal."""
    _display({"text/html": as_html(comparison), "text/plain": as_text(comparison)})


def as_html(comparison: Comparison) -> str:
    """Return the head of the report page as a fragment with scoped style."""
    return tag(
        "div",
        tag("style", verdict_style()),
        tag("p", answer(comparison), class_="answer"),
        tiles(comparison),
        summary_table(comparison),
        class_="workbench",
    )


def as_text(comparison: Comparison) -> str:
    """Return a line per configuration: sign, name, verdict, relative error, distance over budget, factor and more.

    Example:
        >>> print(as_text(comparison))   # doctest: +SKIP
        layout_parity: Does GRPO give every parameter the same gradient in every layout?
        3 of 4 configurations keep the gradient of their reference. 1 differs.
        ≠ missing_cp_factor  different  50 %  6.0 × 10¹¹ of budget  × 0.500 (1 / cp)  step 0, model.norm.weight
    """
    ordered = [c for members in groups(comparison).values() for c in members]
    names = max((len(c.name) for c in ordered), default=0)
    verdicts = max((len(c.verdict) for c in ordered), default=0)
    errors = {c.name: relative_text(relative_error(c)) for c in ordered}
    width = max(map(len, errors.values()), default=0)
    lines = [f"{comparison.experiment}: {comparison.question}", answer(comparison), ""]
    for c in ordered:
        worst = worst_share(c)
        cells = [
            f"{VERDICT_STYLES[c.verdict].sign} {c.name:<{names}}  {c.verdict:<{verdicts}}",
            f"{errors[c.name]:<{width}}",
            f"{NONE if worst is None else share(worst) + ' of budget':<22}",
        ]
        if c.factor is not None:
            cells.append(f"× {near_one(c.factor)}{f' ({c.factor_meaning})' if c.factor_meaning else ''}")
        if c.first_step is not None:
            cells.append(f"step {c.first_step}, {c.first_parameter}")
        if c.failure:
            cells.append(failure_line(c))
        seen = could_have_seen(c)
        cells += filter(None, [divergence(c), declaration(c), f"could have seen: {seen}" if seen else "", *warnings(c)])
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _display(data: dict[str, str]) -> None:
    """Display one object in several formats."""
    from IPython.display import display

    display(data, raw=True)


def verdict_style() -> Markup:
    """Return the style sheet of this module; it applies only inside elements of class ``workbench``."""
    return Markup(STYLE_SHEET.read_text(encoding="utf8"))


def answer(comparison: Comparison) -> str:
    """Summarize the verdicts in sentences, by number, with known faults apart from surprises."""
    judged = [c for c in comparison.configurations if c.against or c.verdict == "failed"]
    count = Counter(c.verdict for c in judged)
    agreeing = sum(count[verdict] for verdict in AGREEING)
    if not judged:
        return " ".join(["Every configuration is a reference: there is nothing to compare.", *_remarks(comparison)])
    sentences = [
        f"1 of {len(judged)} configurations keeps the gradient of its reference."
        if agreeing == 1
        else f"{agreeing} of {len(judged)} configurations keep the gradient of their reference."
    ]
    different = [c for c in judged if c.verdict == "different"]
    if different:
        faulty = sum(bool(faults_of(c)) for c in different)
        how = (
            ", each with a known fault switched on"
            if faulty == len(different) and faulty > 1
            else ", with a known fault switched on"
            if faulty == len(different)
            else f", {faulty} of them with a known fault switched on"
            if faulty
            else ""
        )
        sentences.append(f"{len(different)} differ{'s' if len(different) == 1 else ''}{how}.")
    if count["vacuous"]:
        sentences.append(
            f"{count['vacuous']} {'is' if count['vacuous'] == 1 else 'are'} vacuous: "
            "nothing in the batch could have shown a difference."
        )
    if count["unsound baseline"]:
        sentences.append(
            f"{count['unsound baseline']} {'has' if count['unsound baseline'] == 1 else 'have'} an unsound "
            "baseline, which is not finite or too far from the truth to judge by."
        )
    weak = [c for c in judged if warnings(c)]
    if weak:
        sentences.append(f"Weak evidence for {len(weak)}: {warnings(weak[0])[0]}.")
    if count["failed"]:
        sentences.append(f"{count['failed']} failed and {'has' if count['failed'] == 1 else 'have'} no verdict.")
    unseen = [c.name for c in judged if faults_of(c) and c.verdict in AGREEING]
    if unseen:
        sentences.append(f"Not seen, although a fault was switched on: {', '.join(unseen)}.")
    return " ".join([*sentences, *_remarks(comparison)])


def _remarks(comparison: Comparison) -> list[str]:
    """Return sentences on runs that diverged and on seeds without effect."""
    steps = [step for c in comparison.configurations if (step := diverged_step(c)) is not None]
    first = f"{'at' if len(steps) == 1 else 'the first at'} step {min(steps)}" if steps else ""
    sentences = [f"{len(steps)} of {len(comparison.configurations)} runs diverged, {first}."] if steps else []
    return [*sentences, *(f"{note}." for note in identical_notes(comparison))]


def chip(verdict: str) -> Markup:
    """Return the verdict as a small label with a sign, a word and a hue."""
    look = VERDICT_STYLES[verdict]
    return tag("span", tag("span", look.sign, aria_hidden="true"), " ", verdict, class_=f"chip {look.name}")


def tiles(comparison: Comparison) -> Markup:
    """Return a tile per configuration, in the order of the summary, each a link to its row."""
    ordered = [c for members in groups(comparison).values() for c in members]
    links = [
        tag(
            "a",
            VERDICT_STYLES[c.verdict].sign,
            class_=f"tile {VERDICT_STYLES[c.verdict].name}",
            href=f"#{anchor(comparison, c)}",
            title=f"{c.name}: {c.verdict}",
        )
        for c in ordered
    ]
    count = Counter(c.verdict for c in ordered)
    legend = [tag("li", chip(verdict), f" {count[verdict]}") for verdict in VERDICT_STYLES if count[verdict]]
    return tag("div", tag("p", links, class_="tiles"), tag("ul", legend, class_="tally"), class_="overview")


def anchor(comparison: Comparison, configuration: Configuration) -> str:
    """Return the id of a configuration's row: a number, so that any name is valid."""
    return f"configuration-{comparison.configurations.index(configuration)}"


def summary_table(comparison: Comparison) -> Markup:
    """Tabulate the configurations, each under the reference that it is compared with."""
    shares = {c.name: worst_share(c) for c in comparison.configurations}
    scale, differing = _Scale([s for s in shares.values() if s]), differing_settings(comparison)
    seen = {c.name: could_have_seen(c) for c in comparison.configurations if c.run or c.steps}
    same = len(seen) > 1 and len(set(seen.values())) == 1
    bodies = []
    for members in groups(comparison).values():
        bodies.append(
            tag(
                "tbody",
                [
                    join(
                        _rows(
                            comparison,
                            c,
                            shares[c.name],
                            scale,
                            differing[c.name],
                            _remarks_on(c, "" if same else could_have_seen(c)),
                        )
                    )
                    for c in members
                ],
            )
        )
    head = tag(
        "tr",
        tag("th", "Configuration", scope="col"),
        tag("th", "Verdict", scope="col"),
        tag("th", "Relative error of the gradient", scope="col"),
        tag("th", "Worst distance ÷ budget", scale.labels(), scope="col"),
        tag("th", "Gradient norm", scope="col"),
        tag("th", "First difference", scope="col"),
    )
    notes = list(dict.fromkeys(c.device_note for c in comparison.configurations if c.device_note))
    foot = tag("p", tag("mark"), "ran on CPU with gloo: ", "; ".join(notes), class_="foot")
    if shared := shared_note(comparison):
        foot = tag("p", "Every configuration ran on CPU with gloo: ", shared, class_="foot")
    shared = next(iter(seen.values()), "") if same else ""
    all_saw = tag("p", "Every verdict rests on: ", shared, ".", class_="foot") if shared else None
    return join([tag("table", tag("thead", head), bodies, class_="summary"), foot if notes else None, all_saw])


def shared_note(comparison: Comparison) -> str:
    """Return the note on the device that all runs share, which is shown once and marks no row; "" if they differ."""
    notes = {c.device_note for c in comparison.configurations if c.run}
    return notes.pop() if len(notes) == 1 else ""


def faults_of(configuration: Configuration) -> list[str]:
    """Return the faults that were switched on."""
    return list(configuration.settings.get("faults") or [])


def failure_line(configuration: Configuration) -> str:
    """Return rank and exception of a failure, as far as they are known."""
    failure = configuration.failure or {}
    rank = f"rank {failure['rank']}: " if failure.get("rank") is not None else ""
    return f"{rank}{failure.get('exception') or configuration.state}"


def where_it_ran(comparison: Comparison, configuration: Configuration, *, brief: bool = False) -> Markup:
    """Return layout, precision, ranks and device; with a note, or a mark if brief, if it ran elsewhere than others."""
    ranks = configuration.world_size
    settings = configuration.settings
    parts = [layout_of(settings)] if "layout" in settings else []
    parts += [settings["precision"]] if "precision" in settings else []
    text = " · ".join([*parts, f"{ranks} rank{'s' if ranks > 1 else ''} on {configuration.device}"])
    note = configuration.device_note
    if note in ("", shared_note(comparison)):
        return tag("span", text, class_="where")
    mark = ["\u00a0", tag("mark", title=note)] if brief else [" ", tag("mark", note)]
    return tag("span", text, mark, class_="where")


def _remarks_on(c: Configuration, seen: str) -> list[Markup]:
    """Return what limits a verdict, for below its row; of a reference only what it could have seen."""
    texts = [
        declaration(c) if c.against else "",
        f"could have seen: {seen}" if seen else "",
        *(f"weak evidence: {warning}" for warning in warnings(c)),
    ]
    return [tag("span", text) for text in texts if text]


def _rows(
    comparison: Comparison, c: Configuration, worst: float | None, scale: _Scale, differing: str, remarks: list[Markup]
) -> list[Markup]:
    faults = [tag("span", f"fault: {name}", class_="fault") for name in faults_of(c)]
    first = NONE
    if c.first_step is not None:
        first = tag("span", f"step {c.first_step} ", tag("br"), tag("code", breakable(c.first_parameter or "")))
    elif c.failure:
        first = failure_line(c)
    factor = NONE
    if c.factor is not None:
        factor = tag(
            "span",
            tag("b", f"× {near_one(c.factor)}"),
            tag("br") if c.factor_meaning else None,
            tag("span", c.factor_meaning, class_="meaning"),
        )
    distance = NONE
    if c.verdict == "reference":
        followed = any(other.against == c.name for other in comparison.configurations)
        distance = "baseline of the others" if followed else "baseline of none"
    if worst is not None:
        value = "0, bit for bit" if worst == 0 and is_bitwise_equal(c) else share(worst)
        distance = tag(
            "div",
            scale.bar(worst, VERDICT_STYLES[c.verdict].name),
            tag("span", value, class_="value"),
            class_="distance",
        )
    row = tag(
        "tr",
        tag(
            "th",
            tag("span", breakable(c.name), class_="name"),
            where_it_ran(comparison, c, brief=True),
            tag("span", breakable(differing), class_="where") if differing else None,
            faults,
            scope="row",
            rowspan=2 if remarks else None,
        ),
        tag("td", chip(c.verdict), tag("span", divergence(c), class_="diverged") if divergence(c) else None),
        *(
            tag("td", cell, data_label=label, class_="none" if cell == NONE else None)
            for cell, label in (
                (relative_text(relative_error(c)), "Relative error of the gradient"),
                (distance, "Worst distance ÷ budget"),
                (factor, "Gradient norm"),
                (first, "First difference"),
            )
        ),
        id=anchor(comparison, c),
        class_=f"row {VERDICT_STYLES[c.verdict].name}",
    )
    return [row, tag("tr", tag("td", remarks, colspan=COLUMNS - 1), class_="remarks")] if remarks else [row]


class _Scale:
    """A logarithmic scale that holds every share, with at least a quarter of it below the budget."""

    def __init__(self, shares: list[float]) -> None:
        finite = [s for s in shares if math.isfinite(s)]
        self.high = max(1, math.ceil(math.log10(max(finite, default=10.0)) + 0.2))
        self.low = min(-1, math.floor(math.log10(min(finite, default=0.1)) - 0.2), -math.ceil(self.high / 3))

    def place(self, value: float) -> float:
        """Return per cent of the width; anything below the scale is at its left end, and infinity at its right."""
        if value <= 0:
            return 0.0
        position = self.high if math.isinf(value) else math.log10(value)
        return round(100 * (position - self.low) / (self.high - self.low), 2)

    def bar(self, value: float, name: str) -> Markup:
        """Return a bar that ends at the value, and a tick where the budget is."""
        return tag(
            "span",
            tag("i", class_=f"fill {name}", style=f"width:{self.place(value)}%"),
            tag("i", class_="budget", style=f"left:{self.place(1)}%"),
            class_="bar",
            aria_hidden="true",
        )

    def labels(self) -> Markup:
        """Return the budget, and the end of the scale that is farther from it: the other one would collide with it."""
        low = tag("i", power_of_ten(self.low), style="left:0") if self.place(1) > 52 else None
        high = tag("i", power_of_ten(self.high), style="right:0") if self.place(1) <= 52 else None
        return tag(
            "span",
            low,
            tag("i", "budget", class_="mid", style=f"left:{self.place(1)}%"),
            high,
            class_="scale",
            aria_hidden="true",
        )
