"""Score diagnose on a blind set: ``python -m experiments.diagnosis.blind.score SET [SCORES.json]``.

Makes the set's records in a temporary folder and diagnoses every pair in four forms: float32 and bf16, rich (gradients
and tokens) and poor (loss and norms). The saved ``scores.json`` of a set is that of the one time that it was blind; see
README.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import workbench as wb
from workbench.atomic import to_json, write_whole
from workbench.errors import WorkbenchError

FOLDER = Path(__file__).parent
GROUPS = ("float32-rich", "float32-poor", "bf16-rich", "bf16-poor")
CONFIDENT = 0.5


def score(name: str) -> dict[str, Any]:
    """Score a set; the causes of every pair, by group."""
    expected = yaml.safe_load((FOLDER / name / "expected.yaml").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        records = str(Path(temporary) / "records")
        subprocess.run([sys.executable, str(FOLDER / name / "make.py"), records], check=True, stdout=subprocess.DEVNULL)
        return {group: _group(Path(records) / group, expected) for group in GROUPS}


def _group(folder: Path, expected: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    faults = []
    for fault, right in expected.items():
        causes = _causes(folder / fault / "right", folder / fault / "wrong")
        rank = next((at + 1 for at, (cause, _) in enumerate(causes) if cause in right), None)
        faults.append({"id": fault, "rank": rank, "expected": list(right), "causes": causes[:5]})
    pairs = []
    for pair in sorted((folder / "pairs").iterdir()):
        causes = _causes(pair / "a", pair / "b")
        pairs.append({"pair": pair.name, "equal": causes[0][0] == "no_difference", "causes": causes[:4]})
    return {"faults": faults, "pairs": pairs}


def _causes(trusted: Path, suspect: Path) -> list[tuple[str, float]]:
    try:
        return [(cause.name, round(cause.score, 3)) for cause in wb.diagnose(trusted, suspect).causes]
    except WorkbenchError as error:
        return [(f"refused: {error.parts['found']}"[:160], 0.0)]


def summary(group: Mapping[str, Any]) -> dict[str, int]:
    """Count a group: faults named first, in the first three, told with confidence and wrong; right pairs accused."""
    faults, pairs = group["faults"], group["pairs"]
    confident = [row for row in faults if row["rank"] != 1 and row["causes"][0][1] >= CONFIDENT]
    return {
        "faults": len(faults),
        "first": sum(row["rank"] == 1 for row in faults),
        "in_three": sum((row["rank"] or 9) <= 3 for row in faults),
        "confident_and_wrong": sum(row["causes"][0][0] != "no_difference" for row in confident),
        "pairs": len(pairs),
        "accused": sum(not row["equal"] for row in pairs),
    }


def main(arguments: Sequence[str]) -> None:
    """Score a set, print its summary, and write the scores if a file is named."""
    groups = score(arguments[0])
    for name, group in groups.items():
        print(f"{name:14}", summary(group))
    if len(arguments) > 1:
        write_whole(Path(arguments[1]), to_json({"groups": groups}))


if __name__ == "__main__":
    main(sys.argv[1:])
