"""Ablation: its question, and every planned run with the settings that differ."""

from __future__ import annotations

from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec, changed_settings
from workbench.report.markup import Markup, breakable, table, tag
from workbench.report.rich.spec import setting_text
from workbench.report.rich.strips import framed


def as_html(ablation: AblationSpec) -> Markup:
    """Return a row for each run: its reference, and the settings in which it differs from that."""
    head = tag("p", tag("strong", "AblationSpec"), " ", ablation.question or "(it asks no question)")
    try:
        planned = ablation.expand()
    except SpecError as error:
        return framed(head, tag("pre", str(error), class_="trouble"))
    rows = [
        [
            tag("strong", breakable(run.name)),
            ablation.role(run, planned),
            str(run.world_size),
            ", ".join(f"{key}: {setting_text(value)}" for key, value in changed_settings(run, planned).items())
            or "nothing changed",
        ]
        for run in planned
    ]
    return framed(head, table(["run", "role", "ranks", "differs in"], rows, numbers=[2], class_="table"))
