"""Check the tuned cases: ``python -m experiments.checked_steps.tuned [ID ...]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.checked_steps.blind.score import _check, is_right, summary
from experiments.checked_steps.tuned.cases import FAULTS, clean, dump_of
from experiments.checked_steps.tuned.trainer import write

CLEAN = 120


def rows(ids: list[str], folder: Path, clean_dumps: int = CLEAN) -> dict[str, Any]:
    """Check mistakes and clean dumps; rows as those of a blind set."""
    faults = []
    for one in FAULTS:
        if ids and one.id not in ids:
            continue
        write(dump_of(one), folder / one.id)
        checked = _check(folder / one.id)
        expected = [{"kind": kind, "words": words} for kind, words in one.right]
        rank = next((at for at, cause in enumerate(checked["causes"], 1) if is_right(cause, expected)), None)
        faults.append({"id": one.id, "rank": rank, **checked})
    cleans = []
    for number in range(0 if ids else clean_dumps):
        write(clean(number), folder / f"clean{number}")
        cleans.append({"dump": f"clean{number}", **_check(folder / f"clean{number}")})
    return {"faults": faults, "clean": cleans}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        scores = rows(sys.argv[1:], Path(temporary))
    for row in scores["faults"]:
        if row["rank"] != 1:
            named = [f"{cause['kind']}: {cause['description']}" for cause in row["causes"][:3]]
            print(
                f"{row['id']}: rank {row['rank']}, {row['verdict']} at {row['first']} {row.get('found', '')}",
                *named,
                sep="\n    ",
            )
    for row in scores["clean"]:
        if row["verdict"] not in ("agrees", "vacuous"):
            print(row["dump"], row["verdict"], row["first"], row.get("found", ""), row["causes"][:1])
    print(summary(scores))
