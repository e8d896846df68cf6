"""Proof: each invariant with its verdict, and for a broken one the smallest counterexample, drawn."""

from __future__ import annotations

from typing import Any

from workbench.prove.proof import Counterexample, LawResult, Proof
from workbench.report.markup import Markup, table, tag
from workbench.report.numbers import NONE, near_one, significant
from workbench.report.rich.batch import as_html as batch_html
from workbench.report.rich.strips import framed


def as_html(proof: Proof) -> Markup:
    """Return the verdict, a row for each invariant, and the counterexample of each broken one."""
    head = tag(
        "p",
        tag("strong", proof.subject),
        " ",
        tag("span", proof.verdict, class_=None if proof.ok else "trouble"),
        tag("span", f"; seed {proof.seed}, {significant(proof.seconds)} s", class_="quiet"),
    )
    laws = table(
        ["invariant", "what may change", "verdict", "cases", "worst", "what differs"],
        [_row(law) for law in proof.laws],
        numbers=(3, 4),
        class_="table",
    )
    return framed(head, laws, [_refuted(law, law.counterexample) for law in proof.laws if law.counterexample])


def _row(law: LawResult) -> list[Any]:
    verdict = tag("strong", law.verdict, class_="trouble") if law.verdict == "broken" else law.verdict
    worst = significant(law.worst, 2) if law.cases else NONE
    return [
        tag("code", law.name, class_="whole"),
        law.says,
        tag("span", verdict, class_="whole"),
        law.cases,
        tag("span", worst, class_="whole"),
        _factor(law),
    ]


def _factor(law: LawResult) -> str:
    """Return the factor in short, or why there is none."""
    if law.why or law.counterexample is None:
        return law.why
    what = ", ".join(law.what)
    if law.factor is None:
        return what
    return f"{what}: × {near_one(law.factor)}{f' = {law.factor_name}' if law.factor_name else ''}"


def _refuted(law: LawResult, counterexample: Counterexample) -> Markup:
    """Return a counterexample; open if the loss does not declare the break, else on request."""
    steps = [["plain", counterexample.plain], ["changed", counterexample.changed]]
    return tag(
        "details",
        tag("summary", f"{law.name}: the smallest step that breaks it"),
        tag("p", counterexample.words),
        table(["", "the step"], steps, class_="table"),
        batch_html(counterexample.batch),
        open=law.verdict == "broken",
    )
