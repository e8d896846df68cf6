"""Page of the cost of a bridge between two layouts: the record of `workbench bench bridge` with every sample."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.pages import provenance
from workbench.atomic import write_whole
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import mebibytes, milliseconds
from workbench.report.page import CPU_CAPTION, document
from workbench.report.rich.ranks import traffic_html
from workbench.sharding.bridge import Grid, GridPair
from workbench.sharding.bridge.delivery import Delivery
from workbench.sharding.bridge.traffic import Traffic

DIRECTIONS = ("forward", "backward")


def write_bridge_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``bridge.html`` into a folder atomically."""
    return write_whole(Path(folder) / "bridge.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "bridge"), class_="eyebrow"),
        tag("h1", "What does a bridge between two layouts cost?"),
        tag("p", answer(record), class_="answer"),
    )
    sections: list[tuple[str, Any]] = [(name, bridge(record, name)) for name in record["bridges"]]
    sections += [("Every sample", every_sample(record)), ("Provenance", provenance(record))]
    return document("bridge", [masthead], sections)


def answer(record: Mapping[str, Any]) -> str:
    """Name the fastest way of each pair of layouts, forward and backward together."""
    summaries = []
    for name, entry in record["bridges"].items():
        ways = entry["ways"]
        fastest = min(ways, key=lambda way: sum(ways[way][f"{direction}_ms"] for direction in DIRECTIONS))
        total = sum(ways[fastest][f"{direction}_ms"] for direction in DIRECTIONS)
        summaries.append(f"{name}: fastest is the {fastest}, {milliseconds(total)} both ways.")
    exact = "Every way is exact." if record["bars"]["exact"]["holds"] else "Some ways are wrong: see wrong numbers."
    return f"On {record['ranks']} × {record['device']}, {record['activation']}. {exact} {' '.join(summaries)}"


def bridge(record: Mapping[str, Any], name: str) -> Markup:
    """Time and bytes of each way between two layouts, and the traffic between ranks."""
    measured = record["bridges"][name]
    rows = [
        [
            way,
            *(
                cell
                for direction in DIRECTIONS
                for cell in (milliseconds(entry[f"{direction}_ms"]), mebibytes(entry[f"{direction}_bytes"]))
            ),
            entry["wrong_numbers"],
        ]
        for way, entry in measured["ways"].items()
    ]
    heads = [f"{direction}, {what}" for direction in DIRECTIONS for what in ("time", "from others")]
    pair = GridPair(*(Grid.of(**measured[side]) for side in ("source", "destination")))
    drawings = [
        traffic_html(Traffic.of(pair, how)) for how in (Delivery(order="zigzag"), Delivery("sharded", "zigzag"))
    ]
    return join(
        [
            tag("p", "Median of the slowest rank; bytes of the rank that gets most."),
            tag("p", CPU_CAPTION) if record["device"] == "cpu" else None,
            table(["", *heads, "wrong numbers"], rows, numbers=range(1, 6)),
            drawings,
        ]
    )


def every_sample(record: Mapping[str, Any]) -> Markup:
    """Table of all times, in the order of measurement."""
    rows = [
        [name, way, direction, ", ".join(f"{ms:.2f}" for ms in entry[f"{direction}_samples_ms"])]
        for name, measured in record["bridges"].items()
        for way, entry in measured["ways"].items()
        for direction in DIRECTIONS
    ]
    return table(["", "", "", "ms"], rows)
