"""The verdicts at a glance: the head of the report page, and the output of `show` in a notebook."""

from __future__ import annotations

import math
import sys
from collections import Counter

from workbench.columns import columns
from workbench.compare.comparison import Comparison, Configuration, declared_note, layout_of
from workbench.compare.seeds import identical_notes
from workbench.report.evidence import (
    AGREEING,
    could_have_seen,
    differing_settings,
    diverged_step,
    divergence,
    groups,
    limits,
    relative_error,
    relative_text,
    warnings,
    worst_share,
)
from workbench.report.markup import Markup, breakable, join, style_sheet, tag
from workbench.report.numbers import NONE, near_one, power_of_ten, share
from workbench.report.style import VERDICT_STYLES

COLUMNS = (
    "Configuration",
    "Verdict",
    "Relative error of the gradient",
    "Worst distance ÷ budget",
    "Gradient norm",
    "First difference",
)


def show(comparison: Comparison) -> None:
    """Show the verdicts: HTML in a notebook, and the same as plain text in a terminal."""
    _display({"text/html": as_html(comparison), "text/plain": as_text(comparison)})


def _display(data: dict[str, str]) -> None:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None:  # imported or not, IPython does not run: its display would print the dictionary
        sys.stdout.write(data["text/plain"] + "\n")
        return
    from IPython.display import display

    display(data, raw=True)


def as_html(comparison: Comparison) -> str:
    """Return the head of the report page as a fragment with scoped style."""
    return tag(
        "div",
        tag("style", style_sheet("verdicts.css")),
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
    errors = {c.name: relative_text(relative_error(c)) for c in ordered}
    rows = []
    for c in ordered:
        worst = worst_share(c)
        distance = NONE if worst is None else share(worst) + " of budget"
        cells = []
        if c.factor is not None:
            cells.append(f"× {near_one(c.factor)}{f' ({c.factor_meaning})' if c.factor_meaning else ''}")
        if c.first_step is not None:
            cells.append(f"step {c.first_step}, {c.first_parameter}")
        if c.failure:
            cells.append(failure_line(c))
        more = "  ".join([*cells, *limits(c)])
        rows.append((f"{VERDICT_STYLES[c.verdict].sign} {c.name}", c.verdict, errors[c.name], distance, more))
    head = [f"{comparison.experiment}: {comparison.question}", answer(comparison), ""]
    return "\n".join([*head, *columns(rows, least=(0, 0, 0, 22))])


def answer(comparison: Comparison) -> str:
    """Summarize the verdicts in sentences, by number, with known faults apart from surprises."""
    judged = [c for c in comparison.configurations if c.against or c.verdict == "failed"]
    if not judged:
        return " ".join(["Every configuration is a reference: there is nothing to compare.", *_remarks(comparison)])
    count = Counter(c.verdict for c in judged)
    agreeing = sum(count[verdict] for verdict in AGREEING)
    keep, whose = ("keeps", "its") if agreeing == 1 else ("keep", "their")
    sentences = [f"{agreeing} of {len(judged)} configurations {keep} the gradient of {whose} reference."]
    if different := count["different"]:
        faulty = sum(bool(faults_of(c)) for c in judged if c.verdict == "different")
        which = f"{faulty} of them " if faulty < different else "each " if faulty > 1 else ""
        how = f", {which}with a known fault switched on" if faulty else ""
        sentences.append(f"{different} differ{'s' if different == 1 else ''}{how}.")
    if vacuous := count["vacuous"]:
        is_ = "is" if vacuous == 1 else "are"
        sentences.append(f"{vacuous} {is_} vacuous: nothing in the batch could have shown a difference.")
    if unsound := count["unsound baseline"]:
        has = "has" if unsound == 1 else "have"
        what = "an unsound baseline, which is not finite or too far from the truth to judge by"
        sentences.append(f"{unsound} {has} {what}.")
    if weak := [c for c in judged if warnings(c)]:
        sentences.append(f"Weak evidence for {len(weak)}: {warnings(weak[0])[0]}.")
    if failed := count["failed"]:
        sentences.append(f"{failed} failed and {'has' if failed == 1 else 'have'} no verdict.")
    if unseen := [c.name for c in judged if faults_of(c) and c.verdict in AGREEING]:
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
    links = []
    for c in ordered:
        look, row = VERDICT_STYLES[c.verdict], f"#{anchor(comparison, c)}"
        links.append(tag("a", look.sign, class_=f"tile {look.name}", href=row, title=f"{c.name}: {c.verdict}"))
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
    seen = [could_have_seen(c) for c in comparison.configurations if c.run or c.steps]
    same = seen[0] if len(seen) > 1 and len(set(seen)) == 1 else None
    bodies = []
    for members in groups(comparison).values():
        rows = []
        for c in members:
            remarks = _remarks_on(c, could_have_seen(c) if same is None else "")
            rows.append(_rows(comparison, c, shares[c.name], scale, differing[c.name], remarks))
        bodies.append(tag("tbody", rows))
    labels = {"Worst distance ÷ budget": scale.labels()}
    head = tag("tr", [tag("th", name, labels.get(name), scope="col") for name in COLUMNS])
    foot = None
    if shared := shared_note(comparison):
        foot = tag("p", "Every configuration ran on CPU with gloo: ", shared, class_="foot")
    elif notes := list(dict.fromkeys(c.device_note for c in comparison.configurations if c.device_note)):
        foot = tag("p", tag("mark"), "ran on CPU with gloo: ", "; ".join(notes), class_="foot")
    all_saw = tag("p", "Every verdict rests on: ", same, ".", class_="foot") if same else None
    return join([tag("table", tag("thead", head), bodies, class_="summary"), foot, all_saw])


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
    declared = declared_note(c.settings) if c.against else ""
    weak = (f"weak evidence: {warning}" for warning in warnings(c))
    return [tag("span", text) for text in (declared, seen and f"could have seen: {seen}", *weak) if text]


def _rows(
    comparison: Comparison, c: Configuration, worst: float | None, scale: _Scale, differing: str, remarks: list[Markup]
) -> list[Markup]:
    look = VERDICT_STYLES[c.verdict]
    first = failure_line(c) if c.failure else NONE
    if c.first_step is not None:
        first = tag("span", f"step {c.first_step} ", tag("br"), tag("code", breakable(c.first_parameter or "")))
    factor = NONE
    if c.factor is not None:
        meaning = tag("span", c.factor_meaning, class_="meaning")
        factor = tag("span", tag("b", f"× {near_one(c.factor)}"), tag("br") if c.factor_meaning else None, meaning)
    distance = NONE
    if worst is not None:
        bitwise = worst == 0 and c.whole_gradient and all(w.get("bitwise_equal") for w in c.whole_gradient)
        value = tag("span", "0, bit for bit" if bitwise else share(worst), class_="value")
        distance = tag("div", scale.bar(worst, look.name), value, class_="distance")
    elif c.verdict == "reference":
        followed = any(other.against == c.name for other in comparison.configurations)
        distance = "baseline of the others" if followed else "baseline of none"
    heading = tag(
        "th",
        tag("span", breakable(c.name), class_="name"),
        where_it_ran(comparison, c, brief=True),
        tag("span", breakable(differing), class_="where") if differing else None,
        [tag("span", f"fault: {name}", class_="fault") for name in faults_of(c)],
        scope="row",
        rowspan=2 if remarks else None,
    )
    verdict = tag("td", chip(c.verdict), tag("span", divergence(c), class_="diverged") if divergence(c) else None)
    cells = [
        tag("td", cell, data_label=label, class_="none" if cell == NONE else None)
        for cell, label in zip((relative_text(relative_error(c)), distance, factor, first), COLUMNS[2:], strict=True)
    ]
    row = tag("tr", heading, verdict, cells, id=anchor(comparison, c), class_=f"row {look.name}")
    return [row, tag("tr", tag("td", remarks, colspan=len(COLUMNS) - 1), class_="remarks")] if remarks else [row]


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
