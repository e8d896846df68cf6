"""Score diagnose on every fault, where faults hide, and on right pairs: `python experiments/diagnosis/score.py`.

With names of faults, these alone are scored, and the other rows of results.json are kept. Writes results.json and
report.md. Runs of the same code are not repeated. The diagnoses of faults when they were
unseen are in unseen.json and unseen.md, which are never rewritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import yaml
from page import page
from recorded import HERE, PRECISIONS, acts, drawn_pair, hidden, make, of_pairs, recorded, recorded_once, shown

from workbench.diagnose import Diagnosis, Record, diagnose
from workbench.diagnose.evidence import compare_records
from workbench.errors import SpecError
from workbench.faults import fault_names, load_fault

PAIRS = 200
RIGHT = "right"
"""Name of the record without a fault in a class."""


def names() -> list[str]:
    """Names of the faults that change a number; the others only stall a run."""
    return [name for name in fault_names() if load_fault(name).changes_numbers]


def read_expected() -> dict[str, list[str]]:
    """Read the right causes of every fault.

    Raises:
        SpecError: a fault without any, or causes of a fault that does not exist.
    """
    expected = yaml.safe_load((HERE / "expected.yaml").read_text())
    if off := sorted(set(expected) ^ set(names())):
        raise SpecError(
            "score diagnose",
            found=f"{', '.join(off)} in expected.yaml or among the faults, not in both",
            rule="the causes of a fault are written before it is diagnosed",
            fix="write its causes from its effect",
        )
    return expected


def read_blind() -> list[str]:
    """Read the faults that were written without knowledge of diagnose, and diagnose without knowledge of them."""
    file = HERE / "blind.txt"
    return file.read_text().split() if file.is_file() else []


def score_shown(expected: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Score every fault at every precision, one row each."""
    rows, blind = [], read_blind()
    make([(shown(name, "float64", own_sizes=False), fault) for name in expected for fault in (None, name)])
    own = {name: not _acts(name, own_sizes=False) for name in expected}
    make(
        [
            (shown(name, precision, own_sizes=own[name]), fault)
            for name in expected
            for precision in PRECISIONS
            for fault in (None, name)
        ]
    )
    for precision in PRECISIONS:
        records: dict[str, dict[str, Record]] = {}  # by settings, of every fault that was recorded in them
        for name in expected:
            settings = shown(name, precision, own_sizes=own[name])
            by_fault = records.setdefault(json.dumps(settings, sort_keys=True), {RIGHT: recorded(settings)})
            by_fault[name] = recorded(settings, name)
        for by_fault in records.values():
            for name, record in by_fault.items():
                if name == RIGHT:
                    continue
                alike = sorted(key for key, other in by_fault.items() if key == name or agree(other, record))
                right = sorted({cause for other in alike for cause in expected.get(other, ["no_difference"])})
                causes = ranked_causes(diagnose(by_fault[RIGHT], record))
                rows.append(
                    {
                        "fault": name,
                        "family": load_fault(name).family,
                        "blind": name in blind,
                        "precision": precision,
                        "own_sizes": own[name],
                        "expected": expected[name],
                        "class": alike,
                        "right_causes": right,
                        "causes": causes,
                        "rank": rank(causes, right),
                    }
                )
        print(f"{precision}: {len(expected)} faults")
    return sorted(rows, key=lambda row: (row["fault"], PRECISIONS.index(row["precision"])))


def _acts(name: str, *, own_sizes: bool) -> bool:
    settings = shown(name, "float64", own_sizes=own_sizes)
    return acts(recorded(settings), recorded(settings, name))


def agree(one: Record, other: Record) -> bool:
    """True if two records agree within noise."""
    return not any(step.differs for step in compare_records(one, other).steps)


def score_hidden(chosen: Collection[str]) -> list[dict[str, Any]]:
    """Score every fault with settings that hide it, at every precision; unaffected runs must be called equal."""
    rows, hiding = [], [name for name in chosen if load_fault(name).hidden_in is not None]
    cases = [(name, precision, hidden(name, precision)) for name in hiding for precision in PRECISIONS]
    make([(settings, fault) for name, _, settings in cases for fault in (None, name)])
    for name, precision, settings in cases:
        right, wrong = recorded(settings), recorded(settings, name)
        diagnosis = diagnose(right, wrong)
        rows.append(
            {
                "fault": name,
                "precision": precision,
                "touched": acts(right, wrong),
                "equal": diagnosis.equal,
                "causes": ranked_causes(diagnosis),
            }
        )
    print(f"hidden: {len(rows)}")
    return rows


def score_pairs() -> list[dict[str, Any]]:
    """Score every right pair; it must be called equal."""
    file = of_pairs()
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    left = range(len(rows), PAIRS)
    for number in left:
        drawn_pair(number)  # draws documents that several pairs train on, before the processes share them
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for row in pool.map(score_pair, left):
            rows.append(row)
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    print(f"right pairs: {len(rows)}")
    return rows


def score_pair(number: int) -> dict[str, Any]:
    """Score a right pair."""
    one, other, drawn = drawn_pair(number)
    diagnosis = diagnose(recorded_once(one), recorded_once(other))
    return {"pair": number, **drawn, "equal": diagnosis.equal, "causes": ranked_causes(diagnosis)}


def ranked_causes(diagnosis: Diagnosis) -> list[list[Any]]:
    """All causes in ranked order, each with its score."""
    return [[cause.name, round(cause.score, 3)] for cause in diagnosis.causes]


def rank(causes: list[list[Any]], right: list[str]) -> int | None:
    """Rank of the first right cause, from 1; None if it is not among the causes."""
    return next((index for index, (name, _) in enumerate(causes, 1) if name in right), None)


def scored(chosen: Collection[str], expected: dict[str, list[str]]) -> dict[str, Any]:
    """Score some faults; rows of the others, and right pairs, are those of the record, unless all are chosen."""
    new = {
        "shown": score_shown({name: expected[name] for name in chosen}),
        "hidden": score_hidden(chosen),
    }
    if set(chosen) == set(expected):
        return new | {"pairs": score_pairs()}
    kept = json.loads((HERE / "results.json").read_text())
    merged = {
        kind: sorted(
            [row for row in kept[kind] if row["fault"] in set(expected) - set(chosen)] + rows,
            key=lambda row: (row["fault"], PRECISIONS.index(row["precision"])),
        )
        for kind, rows in new.items()
    }
    return merged | {"pairs": kept["pairs"]}


if __name__ == "__main__":
    torch.set_num_threads(1)  # the decoder is tiny
    expected = read_expected()
    results = {"expected_sha256": hashlib.sha256((HERE / "expected.yaml").read_bytes()).hexdigest()}
    results |= scored(sys.argv[1:] or names(), expected)
    (HERE / "results.json").write_text(json.dumps(results, separators=(",", ":")) + "\n")
    (HERE / "report.md").write_text(page(results, json.loads((HERE / "unseen.json").read_text())))
    print("report: experiments/diagnosis/report.md")
