"""Page of the record of `bench attribution`: causes planted and named, the floor by two methods, a run over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.pages import provenance
from workbench.atomic import write_whole
from workbench.mismatch.verdict import SEEDED, Attribution, Part
from workbench.report.markup import Markup, join, table, tag
from workbench.report.mismatch import STEPS_CAPTION, over_steps
from workbench.report.numbers import significant
from workbench.report.page import document, drawing

QUESTION = "Are the causes of a gap between trainer and sampler named, and is the floor right?"
FLOOR_HEAD = ("decoder", "size", "precision", "drawn, nats", "computed, nats", "drawn / computed")
PLANTED_HEAD = ("case", "planted", "named", "gap, nats", "rest, nats", "floor, nats", "rest")


def write_attribution_report(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``report.html`` into a folder atomically."""
    return write_whole(Path(folder) / "report.html", page(record).encode())


def page(record: Mapping[str, Any]) -> str:
    """Render the page as text; the same record gives the same bytes."""
    masthead = tag(
        "header",
        tag("p", "workbench report · ", tag("b", "attribution"), class_="eyebrow"),
        tag("h1", QUESTION),
        tag("p", answer(record), class_="answer"),
    )
    sections = [
        ("The floor by two methods", floors(record)),
        ("Planted causes", planted(record)),
        ("Clean cases", clean(record)),
        ("Over training steps", steps(record)),
        ("Provenance", provenance(record)),
    ]
    return document("attribution", [masthead], sections)


def answer(record: Mapping[str, Any]) -> str:
    """Summarize the record in sentences."""
    own = record["summary"]
    return (
        f"Of {own['singles']} causes planted alone, {own['first']} are named first; of {own['pairs']} pairs both are "
        f"named in {own['both']}. The rest is at the floor in {own['rest_at_floor']} of {own['planted']} cases. Of "
        f"{own['clean']} clean cases {own['accused']} are accused. The floor is within "
        f"{100 * own['furthest_floor']:.0f} % of the distance from the float64 truth that the computation itself has. "
        "These cases are the author's own: they are no blind set."
    )


def floor_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """Rows of the table of floors."""
    return [
        [
            row["kind"],
            row["size"],
            row["precision"],
            significant(row["drawn"], 3),
            significant(row["real"], 3),
            significant(row["ratio"], 3),
        ]
        for row in record["floors"]
    ]


def floors(record: Mapping[str, Any]) -> Markup:
    """The floor, drawn by rounding each operation at random, and by the computation itself."""
    text = (
        "Mean distance of a token's log-probability from the float64 truth with the same weights. Drawn: each "
        "operation is computed in float64 and rounded at random, over the root of two. Computed: the model in its "
        "precision on this CPU, with two kernels of attention; nothing is drawn there. "
    )
    return join(
        [
            tag("p", text, tag("b", SEEDED)),
            table(FLOOR_HEAD, floor_rows(record), numbers=range(3, 6)),
        ]
    )


def planted(record: Mapping[str, Any]) -> Markup:
    """Cases of one and of two causes."""
    return table(PLANTED_HEAD, [planted_row(row) for row in record["planted"]], numbers=range(3, 6))


def clean(record: Mapping[str, Any]) -> Markup:
    """Clean cases that were accused, if any."""
    own = record["summary"]
    wrong = [row for row in record["clean"] if row["causes"] or row["alarms"]]
    text = (
        f"{own['clean']} cases with drawn precisions, kernels, temperatures, truncation, quantities, lengths and "
        f"batches, by cache or in one pass, all stated as they are: {own['accused']} accused."
    )
    return join(
        [
            tag("p", text),
            table(PLANTED_HEAD, [planted_row(row) for row in wrong], numbers=range(3, 6)) if wrong else None,
        ]
    )


def steps(record: Mapping[str, Any]) -> Markup:
    """The run over steps."""
    history = {int(step): _attribution(one) for step, one in record["steps"].items()}
    text = (
        "A tiny policy, trained by REINFORCE on completions of a bfloat16 sampler. From some step on the sampler's "
        "weights are no longer renewed."
    )
    return join([tag("p", text), drawing("over_steps", STEPS_CAPTION, over_steps(history))])


def _attribution(one: Mapping[str, Any]) -> Attribution:
    """An attribution of a record, as far as figures need it."""
    from workbench.mismatch.alarm import Alarm

    parts = tuple(Part(**{**part, "rivals": tuple(part["rivals"])}) for part in one["parts"])
    own = {name: one[name] for name in ("verdict", "gap", "interactions", "rest", "floor", "alarms", "evidence")}
    return Attribution(**own, parts=parts, undecided=tuple(one["undecided"]), alarm=Alarm(one["safe"]))


def planted_row(row: Mapping[str, Any]) -> Sequence[str]:
    """A case as a row under `PLANTED_HEAD`."""
    return [
        row["case"],
        ", ".join(row["planted"]) or "nothing",
        ", ".join(row["descriptions"]) or "nothing",
        significant(row["gap"], 3),
        significant(row["rest"], 3),
        significant(row["floor"], 3),
        f"alarm: {', '.join(row['alarms'])}" if row["alarms"] else "at the floor",
    ]
