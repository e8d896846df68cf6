"""Diagnosis: the likeliest cause, a row for each cause, and the next experiment."""

from __future__ import annotations

from typing import Any

from workbench.diagnose.diagnosis import Diagnosis, Suspicion
from workbench.report.markup import Markup, table, tag
from workbench.report.rich.strips import framed


def as_html(diagnosis: Diagnosis) -> Markup:
    """Return the headline, the causes with score and evidence, past experiments, and the next one."""
    head = tag(
        "p",
        tag("strong", diagnosis.suspect or "suspect"),
        " against ",
        diagnosis.trusted or "trusted",
        ": ",
        tag("span", diagnosis.headline, class_=None if diagnosis.equal else "trouble"),
    )
    causes = table(
        ["cause", "score", "what it is", "evidence", "not recorded"],
        [_row(cause) for cause in diagnosis.causes],
        numbers=(1,),
        class_="table",
    )
    tried = [tag("p", f"tried {each.experiment.description}: {each.result}") for each in diagnosis.tried]
    return framed(head, causes, _seen(diagnosis), tried, _next(diagnosis))


def _seen(diagnosis: Diagnosis) -> list[Markup]:
    if diagnosis.sight is None:
        return []
    warnings = [tag("p", f"warning: {warning}", class_="trouble") for warning in diagnosis.sight.warnings]
    return [tag("p", f"could have seen: {diagnosis.sight.summary()}", class_="quiet"), *warnings]


def _row(cause: Suspicion) -> list[Any]:
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
