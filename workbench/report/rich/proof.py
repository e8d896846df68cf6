"""Proof: each invariant with its verdict, and for a broken one the smallest counterexample, drawn."""

from __future__ import annotations

from typing import Any

from workbench.prove.proof import Counterexample, InvariantResult, Proof
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
    invariants = table(
        ["invariant", "what may change", "verdict", "cases", "worst", "what differs"],
        [_row(invariant) for invariant in proof.invariants],
        numbers=(3, 4),
        class_="table",
    )
    return framed(
        head,
        invariants,
        [_refuted(invariant, invariant.counterexample) for invariant in proof.invariants if invariant.counterexample],
    )


def _row(invariant: InvariantResult) -> list[Any]:
    verdict = tag("strong", invariant.verdict, class_="trouble") if invariant.verdict == "broken" else invariant.verdict
    worst = significant(invariant.worst, 2) if invariant.cases else NONE
    return [
        tag("code", invariant.name, class_="whole"),
        invariant.says,
        tag("span", verdict, class_="whole"),
        invariant.cases,
        tag("span", worst, class_="whole"),
        _factor(invariant),
    ]


def _factor(invariant: InvariantResult) -> str:
    """Return the factor in short, or why there is none."""
    if invariant.why or invariant.counterexample is None:
        return invariant.why
    what = ", ".join(invariant.differing)
    if invariant.factor is None:
        return what
    return f"{what}: × {near_one(invariant.factor)}{f' = {invariant.factor_name}' if invariant.factor_name else ''}"


def _refuted(invariant: InvariantResult, counterexample: Counterexample) -> Markup:
    """Return a counterexample; open if the loss does not declare the break, else on request."""
    steps = [["plain", counterexample.plain], ["changed", counterexample.changed]]
    return tag(
        "details",
        tag("summary", f"{invariant.name}: the smallest step that breaks it"),
        tag("p", counterexample.description),
        table(["", "the step"], steps, class_="table"),
        batch_html(counterexample.batch),
        open=invariant.verdict == "broken",
    )
