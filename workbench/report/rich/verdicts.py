"""Verdicts: certificates, bisection, diagnosis, proof, and an explanation of two systems' settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.report.markup import Markup, breakable, table, tag
from workbench.report.numbers import NONE, near_one, significant
from workbench.report.rich.batch import batch_html
from workbench.report.rich.runs import setting_text
from workbench.report.rich.strips import framed, quiet

if TYPE_CHECKING:  # drawing one of them imports none of the others
    from workbench.compare.bisect import Bisection, Divergence
    from workbench.compare.certificates import CertificateComparison
    from workbench.diagnose.diagnosis import Diagnosis
    from workbench.diagnose.sight import Sight
    from workbench.metrics.evidence import Evidence
    from workbench.prove.proof import Counterexample, InvariantResult, Proof
    from workbench.systems.explanations import Difference, Explanation

_MOST = 12


def _against(run: str, baseline: str, text: str, *, ok: bool) -> Markup:
    verdict = tag("span", text, class_=None if ok else "trouble")
    return tag("p", tag("strong", run), " against ", baseline, ": ", verdict)


def _seen(evidence: Evidence | Sight | None) -> list[Markup]:
    return [] if evidence is None else [quiet(f"could have seen: {evidence.summary()}")]


def certificates_html(comparison: CertificateComparison) -> Markup:
    """Return the verdict, and below it the tensors that differ, in the order in which the step computes them."""
    head = _against(comparison.run, comparison.reference, comparison.why, ok=comparison.verdict == "equal")
    seen = _seen(comparison.evidence)
    if comparison.equal:
        return framed(head, seen)
    rows = [
        [tag("code", name, class_="whole"), str(comparison.element or "not recorded") if not number else ""]
        for number, name in enumerate(comparison.differing[:_MOST])
    ]
    left = len(comparison.differing) - _MOST
    more = tag("p", f"and {left} more") if left > 0 else ""
    return framed(head, seen, table(["tensor", "first element"], rows, class_="table"), more)


def bisection_html(bisection: Bisection) -> Markup:
    """Return the verdict, and below it the place in a table."""
    verdict, *changes = str(bisection).splitlines()
    head = tag("p", tag("span", verdict, class_=None if bisection.equal else "trouble"))
    place = None
    if bisection.divergence is not None:
        place = table(["", "they part at"], _place(bisection.divergence), class_="table")
    return framed(head, place, [quiet(change.strip()) for change in changes])


def _place(parting: Divergence) -> list[list[Any]]:
    rows: list[list[Any]] = [["step", parting.step], ["way", parting.way], ["tensor", tag("code", parting.tensor)]]
    if parting.tokens is not None:
        rows += [
            ["row", parting.row],
            ["tokens", f"{parting.tokens[0]} to {parting.tokens[1] - 1}"],
            ["blocks that differ", f"{parting.blocks} of {parting.of}"],
        ]
    return rows + ([["the same until", tag("code", parting.before)]] if parting.before else [])


def diagnosis_html(diagnosis: Diagnosis) -> Markup:
    """Return the headline, the causes with score and evidence, past experiments, and the next one."""
    names = diagnosis.suspect or "suspect", diagnosis.trusted or "trusted"
    head = _against(*names, diagnosis.headline, ok=diagnosis.equal)
    warnings = [f"warning: {warning}" for warning in diagnosis.warnings]
    rows = []
    for cause in diagnosis.causes:
        name, evidence, missing = tag("code", cause.name, class_="whole"), "; ".join(cause.evidence), cause.missing
        rows.append([name, f"{cause.score:.2f}", cause.description, evidence, ", ".join(missing)])
    causes = table(["cause", "score", "what it is", "evidence", "not recorded"], rows, numbers=(1,), class_="table")
    tried = [tag("p", f"tried {each.experiment.description}: {each.result}") for each in diagnosis.tried]
    seen = [*_seen(diagnosis.sight), *(tag("p", warning, class_="trouble") for warning in warnings)]
    following = None
    if experiment := diagnosis.next_experiment():
        excludes = f"; it would rule out {', '.join(experiment.excludes)}, or leave only these"
        following = tag("p", "next: ", tag("strong", experiment.description), excludes)
    return framed(head, causes, seen, tried, following)


def proof_html(proof: Proof) -> Markup:
    """Return the verdict, a row for each invariant, and the counterexample of each broken one."""
    head = tag(
        "p",
        tag("strong", proof.subject),
        " ",
        tag("span", proof.verdict, class_=None if proof.ok else "trouble"),
        tag("span", f"; seed {proof.seed}, {significant(proof.seconds)} s", class_="quiet"),
    )
    names = ["invariant", "what may change", "verdict", "cases", "worst", "what differs"]
    invariants = table(names, [_invariant(each) for each in proof.invariants], numbers=(3, 4), class_="table")
    refuted = [_refuted(each, each.counterexample) for each in proof.invariants if each.counterexample]
    return framed(head, invariants, refuted)


def _invariant(invariant: InvariantResult) -> list[Any]:
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


def explanation_html(explanation: Explanation) -> Markup:
    """Return a row for each setting that differs, those that act first; below it the notes on the systems."""
    first, second = explanation.systems
    verdict = str(explanation).splitlines()[0].partition(": ")[2]
    head = [tag("p", tag("strong", f"{first} | {second}"), " ", verdict)]
    if (example := explanation.counterexample) is not None:
        both = (example.losses, example.gradient_norms)
        losses, norms = (" | ".join(significant(value, 10) for value in values) for values in both)
        head.append(tag("p", f"batch {example.seed}: loss {losses}, gradient norm {norms}"))
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
