"""Page of the record of `bench sensitivity`: what a comparison sees, and what the gates of other projects would see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.pages import provenance
from workbench.atomic import write_whole
from workbench.report.markup import Markup, join, table, tag
from workbench.report.page import document

QUESTION = "Which known bugs would this comparison have rejected?"
PRECISIONS = ("float64", "float32")


def write_sensitivity_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` into a folder atomically."""
    return write_whole(Path(folder) / "report.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "mutation score"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    return document(
        "sensitivity",
        [masthead],
        [
            ("Gates", gates(record)),
            ("Survivors", survivors(record)),
            ("Killed", killed(record)),
            ("Not admissible", inadmissible(record)),
            ("Provenance", provenance(record)),
        ],
    )


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in three sentences."""
    own = record["float64"]
    differing = sum(len(record[precision]["disagreements"]) for precision in PRECISIONS)
    tested = [result["generated"] for result in own["results"] if result["generated"] is not None]
    predictions = own["admissible"] + record["float32"]["admissible"]
    return (
        f"Of {own['gradient_admissible']} admissible faults that make a gradient wrong, the comparison of "
        f"{own['ablation']} rejects {own['gradient_killed']}; {own['killed']} of {own['admissible']} with those of "
        f"reported numbers and of the update. Survivors were predicted from data and settings, and {differing} of "
        f"{predictions} predictions differ from their measurement. A generated dataset of "
        f"{own['dataset']['tokens']} tokens kills {sum(tested)} of the {len(tested)} faults that data can show."
    )


def gate_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table of gates: ours, then those of other projects, with their kill rates in both precisions."""

    def rates(entries: Mapping[str, Any]) -> list[str]:
        return [
            f"{entries[precision][f'{kind}killed']} of {entries[precision][f'{kind}admissible']}"
            for precision in PRECISIONS
            for kind in ("gradient_", "")
        ]

    rows = [["this comparison", "every parameter's gradient, its own budget", "all", *rates(record)]]
    for gate in record["gates"]:
        bounds = "; ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in gate["bounds"].items())
        rows.append([gate["name"], bounds, "all" if gate["steps"] is None else str(gate["steps"]), *rates(gate)])
    return rows


HEADS = (
    "check",
    "bounds",
    "steps",
    "float64, gradients",
    "float64, all faults",
    "float32, gradients",
    "float32, all faults",
)


def gates(record: Mapping[str, Any]) -> Markup:
    """Table of kill rates, with the source of each gate's tolerances."""
    sources = [tag("p", tag("b", gate["name"]), f": {gate['source']}.") for gate in record["gates"]]
    note = (
        "Every gate is applied to the same faulty runs, against the run of the same configuration without the fault: "
        "its false alarms between right layouts are not counted."
    )
    return join([tag("p", note), table(list(HEADS), gate_rows(record), numbers=(2, 3, 4, 5, 6)), sources])


def survivors(record: Mapping[str, Any]) -> Markup:
    """Table of faults that the comparison accepts in float64, with reasons and the smallest change that kills each."""
    rows = [
        [
            tag("code", result["fault"]),
            result["configuration"],
            "; ".join(result["missing"]) or tag("b", "not predicted"),
            _remedy(result),
            {True: "killed", False: tag("b", "survives"), None: ""}[result["generated"]],
        ]
        for result in record["float64"]["results"]
        if not result["killed"]
    ]
    return table(["fault", "run", "missing", "smallest change that kills it", "generated dataset"], rows)


def _remedy(result: Mapping[str, Any]) -> str:
    killing = [remedy["change"] for remedy in result["remedies"] if remedy["killed"]]
    return killing[0] if killing else "none of those tried" if result["remedies"] else ""


def killed(record: Mapping[str, Any]) -> Markup:
    """Table of faults that the comparison rejects in float64."""
    rows = [
        [tag("code", result["fault"]), result["configuration"], result["verdict"], result["why"]]
        for result in record["float64"]["results"]
        if result["killed"]
    ]
    return table(["fault", "run", "verdict", "why"], rows)


def inadmissible(record: Mapping[str, Any]) -> Markup:
    """Table of faults whose seam no run of the ablation calls."""
    rows = [[tag("code", name), tag("code", seam)] for name, seam in record["float64"]["inadmissible"].items()]
    return table(["fault", "seam that no run calls"], rows)
