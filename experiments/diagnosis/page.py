"""Page of a score, from its results and from those of faults when they were unseen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PRECISIONS = ("float64", "float32", "bfloat16")
RIGHT = "right"
Row = dict[str, Any]


def page(results: dict[str, Any], unseen: dict[str, Any]) -> str:
    """Render the page in Markdown.

    Args:
        results: of the current diagnose.
        unseen: rows of faults that diagnose had not been written against, by diagnose at that time.
    """
    shown, hidden, pairs = results["shown"], results["hidden"], results["pairs"]
    untouched = [row for row in hidden if not row["touched"]]
    faults = sorted({row["fault"] for row in shown})
    blind = {row["fault"] for row in shown if row["blind"]}
    return "\n".join(
        [
            "# How often diagnose is right",
            "",
            "`python experiments/diagnosis/score.py` writes this page and results.json, which holds every row.",
            "",
            f"{len(faults)} faults, each in one step of a tiny decoder on simulated ranks: cp 2, dp 3, 5 micro-batches "
            "(tp 2 and other settings where a fault needs them). Diagnose is given the right record and the wrong one. "
            "What counts as the right cause was written from what each fault does (expected.yaml), before it was "
            "diagnosed here. Faults whose records agree within noise under the same settings form a class, and a "
            "cause of any of "
            "the class is right. A fault that is within noise of the right record at a precision is not scored there.",
            "",
            f"{len(blind)} faults were written without knowledge of diagnose, and diagnose without knowledge of them. "
            f"{_when_unseen(unseen['shown'])} Only that measures how diagnose meets what it has not seen. What it "
            "missed there was looked at since, and it has rules for that now: the scores of today's version are all of "
            "faults on view.",
            "",
            "## True cause",
            "",
            "| faults | precision | scored | first | in the first three | within noise |",
            "|---|---|---:|---:|---:|---:|",
            *_scores("all, on view", shown),
            *_scores("always on view", [row for row in shown if not row["blind"]]),
            *_scores("unseen once, on view", [row for row in shown if row["blind"]]),
            *_scores("the same when unseen, by diagnose of then", unseen["shown"]),
            "",
            f"Asked for: first in 90 %, in the first three in all. {_verdict(shown, unseen['shown'])}",
            "",
            "## Nothing to find",
            "",
            f"- {len(untouched)} records with a fault where it changes nothing: {_equal(untouched)} called equal.",
            *(f"  - {row['fault']} in {row['precision']}: {_causes(row, 3)}" for row in untouched if not row["equal"]),
            f"- {len(hidden) - len(untouched)} with a fault that leaves loss and gradient as they are there, and still "
            "changes something that is recorded:",
            *(f"  - {row['fault']} in {row['precision']}: {_causes(row, 3)}" for row in hidden if row["touched"]),
            f"- {len(pairs)} pairs of right runs of three steps in two layouts, with other seeds, losses, learning "
            f"rates and temperatures ({_by_precision(pairs)}): {len(pairs) - _equal(pairs)} accused.",
            *(
                f"  - pair {row['pair']} ({row['precision']}, {row['loss']}, learning rate {row['learning_rate']:g}, "
                f"{' against '.join(row['layouts'])}): {_causes(row, 3)}"
                for row in pairs
                if not row["equal"]
            ),
            "",
            "## Where the true cause is not first",
            "",
            "| fault | precision | place | right | diagnosed |",
            "|---|---|---:|---|---|",
            *(
                f"| {row['fault']}{_star(row)} | {row['precision']} | {row['rank'] or 'none'} | "
                f"{', '.join(row['right_causes'])} | {_causes(row, 4)} |"
                for row in scored(shown)
                if row["rank"] != 1
            ),
            "",
            "## Classes",
            "",
            "Faults that no record here tells apart, at each precision:",
            "",
            *_classes(shown),
            "",
            "## Every fault",
            "",
            "Place of the true cause; - is within noise; * was unseen once.",
            "",
            "| fault | right causes | " + " | ".join(PRECISIONS) + " |",
            "|---|---|" + "---:|" * len(PRECISIONS),
            *(_line(name, [row for row in shown if row["fault"] == name]) for name in faults),
            "",
        ]
    )


def scored(rows: Sequence[Row]) -> list[Row]:
    """Select the rows that differ from the right record beyond noise."""
    return [row for row in rows if RIGHT not in row["class"]]


def first(rows: Sequence[Row], places: int = 1) -> int:
    """Count the rows whose true cause is among the first ``places``."""
    return sum(row["rank"] is not None and row["rank"] <= places for row in rows)


def _scores(label: str, rows: Sequence[Row]) -> list[str]:
    lines = []
    for precision in (*PRECISIONS, "together") if rows else ():
        here = [row for row in rows if precision in (row["precision"], "together")]
        counted = scored(here)
        lines.append(
            f"| {label} | {precision} | {len(counted)} | {_share(first(counted), len(counted))} | "
            f"{_share(first(counted, 3), len(counted))} | {len(here) - len(counted)} |"
        )
    return lines


def _share(some: int, of: int) -> str:
    return f"{some} ({some / of:.1%})" if of else "0"


def _when_unseen(rows: Sequence[Row]) -> str:
    """Describe their only measurement, at each precision."""
    parts = []
    for precision in PRECISIONS:
        counted = scored([row for row in rows if row["precision"] == precision])
        parts.append(f"first {first(counted)} of {len(counted)}, in the first three {first(counted, 3)} ({precision})")
    return f"When they were unseen: {'; '.join(parts)}; unseen.md is the page of then."


def _verdict(shown: Sequence[Row], unseen: Sequence[Row]) -> str:
    sentences = []
    for label, rows in (("all faults, on view", shown), ("those that were unseen, by diagnose of then", unseen)):
        counted = scored(rows)
        if counted:
            most, every = first(counted) >= 0.9 * len(counted), first(counted, 3) == len(counted)
            sentences.append(
                f"By {label}: the first is {'reached' if most else 'missed'}, "
                f"the second {'reached' if every else 'missed'}."
            )
    return " ".join(sentences)


def _equal(rows: Sequence[Row]) -> int:
    return sum(row["equal"] for row in rows)


def _by_precision(rows: Sequence[Row]) -> str:
    counts = {name: sum(row["precision"] == name for row in rows) for name in PRECISIONS}
    return ", ".join(f"{count} in {name}" for name, count in counts.items() if count)


def _causes(row: Row, most: int) -> str:
    return ", ".join(f"{name} {score:.2f}" for name, score in row["causes"][:most])


def _star(row: Row) -> str:
    return "*" if row["blind"] else ""


def _classes(shown: Sequence[Row]) -> list[str]:
    lines = []
    for precision in PRECISIONS:
        classes = {tuple(row["class"]) for row in shown if row["precision"] == precision and len(row["class"]) > 1}
        lines += [
            f"- {precision}: {', '.join('no fault' if name == RIGHT else name for name in sorted(members))}"
            for members in sorted(classes)
        ]
    return lines or ["- none"]


def _line(name: str, rows: Sequence[Row]) -> str:
    places = {row["precision"]: "-" if RIGHT in row["class"] else str(row["rank"] or "none") for row in rows}
    causes = ", ".join(next(row["expected"] for row in rows))
    return f"| {name}{_star(rows[0])} | {causes} | " + " | ".join(places.get(each, "") for each in PRECISIONS) + " |"
