"""Parts that pages of several experiments have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.report.markup import Markup, table, tag
from workbench.report.numbers import NONE
from workbench.specs.reading import flatten


def provenance(record: Mapping[str, Any], **more: str) -> Markup:
    """Table of versions, git state, command and machine."""
    facts = {"command": record.get("command"), "device": record["device"], **more}
    return facts_table(facts | flatten(record["provenance"]))


def facts_table(facts: Mapping[str, Any]) -> Markup:
    """Table of names and values, sorted by name."""
    return table(
        ["what", "value"],
        [[tag("code", key), NONE if value is None else str(value)] for key, value in sorted(facts.items())],
        class_="prose",
    )
