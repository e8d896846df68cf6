"""Page of the record of `bench encoder_bridge`: two modules in two layouts, compared with one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.pages import provenance
from workbench.atomic import write_whole
from workbench.report.markup import Markup, join, table, tag
from workbench.report.numbers import significant
from workbench.report.page import document

QUESTION = "Do an encoder and a policy in two layouts train as one process does?"


def write_encoder_bridge_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` into a folder atomically."""
    return write_whole(Path(folder) / "report.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "encoder and policy"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    return document(
        "encoder_bridge",
        [masthead],
        [
            ("Layouts", layouts(record)),
            ("Which check sees which bug", faults(record)),
            ("Provenance", provenance(record)),
        ],
    )


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in two sentences."""
    farthest = max(entry["distance"] for entry in record["layouts"].values())
    missed = [name for name, entry in record["faults"].items() if entry["passes_adam"]]
    verdict = "Yes" if record["bars"]["layouts"]["holds"] else "No"
    return (
        f"{verdict}: in {len(record['layouts'])} pairs of layouts the farthest gradient of all parameters is "
        f"{farthest:.1e} off. Of {len(record['faults'])} planted bugs gradients see "
        f"{sum(entry['distance'] > 1e-6 for entry in record['faults'].values())}; the usual check, weights after "
        f"one step of Adam, lets {len(missed)} pass."
    )


def layouts(record: Mapping[str, Any]) -> Markup:
    """Table of every pair of layouts, with the gradient farthest from one rank's."""
    rows = [
        [
            name,
            _label(entry["encoder"]),
            _label(entry["policy"]),
            entry["delivery"],
            entry["path"],
            entry["micro_batches"],
            entry["parameters"],
            f"{entry['distance']:.1e}",
        ]
        for name, entry in record["layouts"].items()
    ]
    heads = ["", "encoder", "policy", "delivered", "path", "micro-batches", "parameters", "farthest gradient"]
    return table(heads, rows, numbers=(5, 6, 7))


def faults(record: Mapping[str, Any]) -> Markup:
    """Table of every planted bug: its effect on loss and gradients, and the results of three checks."""
    adam = record["adam"]
    rows = [
        [
            name.replace("_", " "),
            *(significant(entry[part], 4) for part in ("loss", "encoder", "policy")),
            significant(entry["distance"], 2),
            tag("b", "passes") if entry["passes_adam"] else "fails",
            f"{entry['adam_largest']:.1e}",
            entry["diagnosis"].replace("_", " "),
        ]
        for name, entry in record["faults"].items()
    ]
    heads = ["", "loss", "encoder", "policy", "gradients off by", "after Adam", "largest difference", "diagnose"]
    notes = [
        tag("p", tag("b", name.replace("_", " ")), f": {entry['what']}. {entry['evidence']}.")
        for name, entry in record["faults"].items()
    ]
    return join(
        [
            tag(
                "p",
                "Loss and norms of both gradients as parts of the right ones. After one step of Adam at a "
                f"learning rate of {adam['learning_rate']:g}, weights are compared with a tolerance of "
                f"{adam['tolerance']:g}: two steps are at most twice the learning rate apart, so this check "
                "cannot fail.",
            ),
            table(heads, rows, numbers=(1, 2, 3, 4, 6)),
            notes,
        ]
    )


def _label(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name}{size}" for name, size in sizes.items()) or "1 rank"
