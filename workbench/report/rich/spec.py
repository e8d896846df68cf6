"""Spec of a run: the settings that are not defaults, and everything on request."""

from __future__ import annotations

import json
import math
from typing import Any

from workbench.atomic import to_json
from workbench.report.markup import Markup, table, tag
from workbench.report.numbers import significant
from workbench.report.rich.strips import framed
from workbench.specs.run import RunSpec, flatten


def as_html(spec: RunSpec) -> Markup:
    """Return a table of the changed settings; every setting below it."""
    everything = to_json(spec.model_dump(mode="json")).decode().rstrip()
    head = tag(
        "p",
        tag("strong", "RunSpec"),
        f" {spec.content_hash()}: {spec.layout}, {spec.precision}, {spec.steps} step{'s' if spec.steps > 1 else ''}",
    )
    return framed(head, _changes(spec), tag("details", tag("summary", "every setting"), tag("pre", everything)))


def setting_text(value: Any) -> str:
    """Format a setting as in YAML; infinity as its sign."""
    if isinstance(value, float) and not math.isfinite(value):
        return significant(value)
    return value if isinstance(value, str) else json.dumps(value)


def _changes(spec: RunSpec) -> Markup:
    default = flatten(RunSpec().model_dump(mode="json"))
    rows = [
        [tag("code", key), setting_text(value), setting_text(default[key])]
        for key, value in flatten(spec.model_dump(mode="json")).items()
        if value != default[key]
    ]
    if not rows:
        return tag("p", "Every setting is as it is by default.", class_="quiet")
    return table(["setting", "here", "by default"], rows, class_="table")
