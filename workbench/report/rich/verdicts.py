"""Verdicts: certificates, bisection, diagnosis, proof, and an explanation of two systems' settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.report.markup import Markup, breakable, table, tag
from workbench.report.numbers import NONE, near_one, significant
from workbench.report.rich.batch import batch_html
from workbench.report.rich.runs import setting_text
from workbench.report.rich.strips import framed

if TYPE_CHECKING:  # drawing one of them imports none of the others
    from workbench.compare.bisect import Bisection, Divergence
    from workbench.compare.certificates import CertificateComparison
    from workbench.diagnose.diagnosis import Diagnosis, Suspicion
    from workbench.metrics.evidence import Evidence
    from workbench.prove.proof import Counterexample, InvariantResult, Proof
    from workbench.systems.explanations import Difference, Explanation

_MOST = 12


def _against(run: str, baseline: str, text: str, *, ok: bool) -> Markup:
    verdict = tag("span", text, class_=None if ok else "trouble")
    return tag("p", tag("strong", run), " against ", baseline, ": ", verdict)


def _seen(evidence: Evidence | None) -> list[Markup]:
    return [] if evidence is None else [tag("p", f"could have seen: {evidence.summary()}", class_="quiet")]


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
    return framed(
        head,
        seen,
        table(["tensor", "first element"], rows, class_="table"),
        tag("p", f"and {left} more") if left > 0 else "",
    )


def bisection_html(bisection: Bisection) -> Markup:
    """Return the verdict, and below it the place in a table."""
    verdict, *changes = str(bisection).splitlines()
    head = tag("p", tag("span", verdict, class_=None if bisection.equal else "trouble"))
    place = (
        []
        if bisection.divergence is None
        else table(["", "they part at"], _place(bisection.divergence), class_="table")
    )
    return framed(head, place, [tag("p", change.strip(), class_="quiet") for change in changes])


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
    warnings = [f"warning: {warning}" for warning in (diagnosis.sight.warnings if diagnosis.sight else ())]
    causes = table(
        ["cause", "score", "what it is", "evidence", "not recorded"],
        [_cause(cause) for cause in diagnosis.causes],
        numbers=(1,),
        class_="table",
    )
    tried = [tag("p", f"tried {each.experiment.description}: {each.result}") for each in diagnosis.tried]
    seen = [*_seen(diagnosis.sight), *(tag("p", warning, class_="trouble") for warning in warnings)]
    return framed(head, causes, seen, tried, _next(diagnosis))


def _cause(cause: Suspicion) -> list[Any]:
    return [
        tag("code", cause.name, class_="whole"),
        f"{cause.score:.2f}",
        cause.description,
        "; ".join(cause.evidence),
        ", ".join(cause.missing),
    ]


def _next(diagnosis: Diagnosis) -> list[Markup]:
    experiment = diagnosis.next_experiment()
    if experiment is None:
        return []
    return [
        tag(
            "p",
            "next: ",
            tag("strong", experiment.description),
            f"; it would rule out {', '.join(experiment.excludes)}, or leave only these",
        )
    ]


def proof_html(proof: Proof) -> Markup:
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
        [_invariant(invariant) for invariant in proof.invariants],
        numbers=(3, 4),
        class_="table",
    )
    return framed(
        head,
        invariants,
        [_refuted(invariant, invariant.counterexample) for invariant in proof.invariants if invariant.counterexample],
    )


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
