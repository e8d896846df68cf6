"""Explanation: the verdict on two systems' settings, the batch that separates them, and each difference."""

from __future__ import annotations

from workbench.report.markup import Markup, breakable, table, tag
from workbench.report.numbers import significant
from workbench.report.rich.spec import setting_text
from workbench.report.rich.strips import framed
from workbench.systems.explanations import Difference, Explanation


def as_html(explanation: Explanation) -> Markup:
    """Return a row for each setting that differs, those that act first; below it the notes on the systems."""
    first, second = explanation.systems
    verdict = str(explanation).splitlines()[0].partition(": ")[2]
    head = [tag("p", tag("strong", f"{first} | {second}"), " ", verdict)]
    if explanation.counterexample is not None:
        losses = " | ".join(significant(loss, 10) for loss in explanation.counterexample.losses)
        norms = " | ".join(significant(norm, 10) for norm in explanation.counterexample.gradient_norms)
        head.append(tag("p", f"batch {explanation.counterexample.seed}: loss {losses}, gradient norm {norms}"))
    rows = [
        [tag("strong", breakable(d.setting)), d.topic, _cell(d, 0), _cell(d, 1), "yes" if d.acts else "no"]
        for d in explanation.differences
    ]
    body = [table(["setting", "about", first, second, "acts"], rows, class_="table")] if rows else []
    paragraphs = [
        tag("p", f"{title}: {note}")
        for title, notes in zip(explanation.systems, explanation.notes, strict=True)
        for note in notes
    ]
    return framed(*head, *body, *paragraphs)


def _cell(difference: Difference, side: int) -> str:
    option = difference.options[side]
    return f"{setting_text(difference.values[side])}{f' ({option})' if option else ''}"
