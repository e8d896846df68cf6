"""Page of the record of `bench attribution_gpu`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.attribution.page import PLANTED_HEAD, planted_row
from experiments.pages import provenance
from workbench.atomic import write_whole
from workbench.mismatch.verdict import SEEDED
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import significant
from workbench.report.page import document

QUESTION = "What gap does a sampler on a GPU have, and is it told by its causes at 0.6 billion parameters?"
FLOOR_HEAD = ("precision", "drawn, nats", "computed, nats", "drawn / computed", "tokens")
SAFE_HEAD = ("case", "mean distance, nats", "mean with sign, nats", "one completion, nats")


def write_gpu_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` into a folder atomically."""
    return write_whole(Path(folder) / "report.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "attribution on a GPU"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    sections = [
        ("Cases", cases(record)),
        ("What is safe", safe(record)),
        ("The floor by two methods", floors(record)),
        ("Provenance", provenance(record)),
    ]
    return document("attribution on a GPU", [masthead], sections)


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in sentences."""
    planted = [row for row in record["cases"] if row["planted"]]
    clean = [row for row in record["cases"] if not row["planted"]]
    named = sum(set(row["causes"]) == set(row["planted"]) for row in planted)
    accused = sum(bool(row["causes"] or row["alarms"]) for row in clean)
    return (
        f"{record['model']}, float32 weights, on {record['device']}: of {len(planted)} cases with causes that no "
        f"setting states, {named} have exactly these named; of {len(clean)} cases that state all there is, {accused} "
        "are accused. These cases are the author's own: they are no blind set."
    )


def cases(record: Mapping[str, Any]) -> Markup:
    """Cases, planted and clean."""
    return table(PLANTED_HEAD, [planted_row(row) for row in record["cases"]], numbers=range(3, 6))


def safe(record: Mapping[str, Any]) -> Markup:
    """Thresholds of the clean cases: above them a gap has a cause other than rounding."""
    rows = [
        [row["case"], *(significant(value, 3) for value in row["safe"].values())]
        for row in record["cases"]
        if not row["planted"]
    ]
    text = "One false alarm in 100 batches of this many tokens, for this model, these precisions and these lengths. "
    return join([tag("p", text, tag("b", SEEDED)), table(SAFE_HEAD, rows, numbers=range(1, 4))])


def floor_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table of floors."""
    return [
        [row["precision"], *(significant(row[key], 3) for key in ("drawn", "real", "ratio")), str(row["tokens"])]
        for row in record["floors"]
    ]


def floors(record: Mapping[str, Any]) -> Markup:
    """The floor, drawn by rounding each operation at random, and by the computation itself."""
    return table(FLOOR_HEAD, floor_rows(record), numbers=range(1, 5))
