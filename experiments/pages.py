"""Parts that pages of several experiments have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import RecordError
from workbench.report.markup import Markup, table, tag
from workbench.report.numbers import NONE
from workbench.specs.reading import flatten


def expect_benchmark(record: Mapping[str, Any], name: str) -> None:
    """Raise if a record is not one of this benchmark, whose numbers a page would give another meaning.

    Raises:
        RecordError: a record of another benchmark.
    """
    if record["benchmark"] != name:
        raise RecordError(
            f"page of {name}",
            found=f"a record of {record['benchmark']}",
            rule="a page is of the measurement that it describes",
            fix=f"give it a record of {name}",
        )


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
