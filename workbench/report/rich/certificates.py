"""Certificates of two runs: the verdict, the first element that differs, and every tensor that differs."""

from __future__ import annotations

from workbench.compare.certificates import CertificateComparison
from workbench.report.markup import Markup, table, tag
from workbench.report.rich.strips import framed

_MOST = 12


def as_html(comparison: CertificateComparison) -> Markup:
    """Return the verdict, and below it the tensors that differ, in the order in which the step computes them."""
    head = tag(
        "p",
        tag("strong", comparison.run),
        " against ",
        comparison.reference,
        ": ",
        tag("span", comparison.why, class_=None if comparison.verdict == "equal" else "trouble"),
    )
    seen = (
        []
        if comparison.evidence is None
        else [tag("p", f"could have seen: {comparison.evidence.summary()}", class_="quiet")]
    )
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
