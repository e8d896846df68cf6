"""Diagnose pairs of right runs: ``python -m experiments.diagnosis.rounding.measure [ROUNDING.json]``.

Each pair of `pairs.yaml` is recorded in four forms, as the pairs of blind sets are, and diagnosed three times: with the
tolerances of `workbench.diagnose.noise`, with half of them, and with a quarter, which says how much room they leave.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

import workbench as wb
from experiments.diagnosis.blind.set5.common import Run
from experiments.diagnosis.rounding.loops import LOOPS
from workbench.atomic import to_json, write_whole
from workbench.diagnose import noise

FOLDER = Path(__file__).parent
FORMS = ("float32-rich", "float32-poor", "bf16-rich", "bf16-poor")
TIMES = (1.0, 0.5, 0.25)
SEED = 3000


def pairs() -> list[dict[str, Any]]:
    """The pairs, each with its seed."""
    rows = yaml.safe_load((FOLDER / "pairs.yaml").read_text())
    return [{**row, "seed": SEED + number} for number, row in enumerate(rows)]


def record(folder: Path, form: str, pair: dict[str, Any]) -> tuple[Path, Path]:
    """Record both runs of a pair."""
    precision, mode = form.split("-")
    for side in "ab":
        LOOPS[pair["loop"]](Run(folder / side, precision, mode == "rich", None, pair["seed"], pair[side]))
    return folder / "a", folder / "b"


@contextlib.contextmanager
def tolerances(times: float) -> Iterator[None]:
    """Multiply the tolerances of all precisions."""
    tables = [table for table in vars(noise).values() if isinstance(table, dict) and "bfloat16" in table]
    kept = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: value * times for name, value in table.items()})
        yield
    finally:
        for table, values in zip(tables, kept, strict=True):
            table.update(values)


def accused(sides: tuple[Path, Path], times: float = 1.0) -> list[tuple[str, float]]:
    """The causes that are told of a right pair; [] if none is."""
    with tolerances(times):
        diagnosis = wb.diagnose(*sides)
    return [] if diagnosis.equal else [(cause.name, round(cause.score, 2)) for cause in diagnosis.causes[:3]]


def main(arguments: Sequence[str]) -> None:
    """Print the pairs that are accused, and their number; write the numbers if a file is named."""
    torch.set_num_threads(1)
    counts = {form: {str(times): 0 for times in TIMES} for form in FORMS}
    for form in FORMS:
        for pair in pairs():
            with tempfile.TemporaryDirectory() as folder:
                sides = record(Path(folder), form, pair)
                for times in TIMES:
                    if causes := accused(sides, times):
                        counts[form][str(times)] += 1
                        print(form, times, pair, causes, flush=True)
    result = {"pairs": len(pairs()), "accused_with_tolerances_times": counts}
    print(result)
    if arguments:
        write_whole(Path(arguments[0]), to_json(result))


if __name__ == "__main__":
    main(sys.argv[1:])
