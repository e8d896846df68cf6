"""Measure every planted cause: ``python measure.py OUT`` adds ``moved`` and ``noise`` to causes.yaml.

``moved``: mean distance in nats between the values of the drawn tokens with this factor alone and with none, in the
sampler's or the trainer's own passes. ``noise``: mean distance between what is recorded and the same computed in
other batches (single rows for batches, batches for single rows and for a cache).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from cases import ATTN, CASES, HEAD, LORA, TRUNK, Case, write
from make import logging, torch
from sampler import World, recorded, scored, truth

ROUNDING = {ATTN, HEAD, TRUNK}


def distance(a: list[list[float]], b: list[list[float]]) -> float:
    """Return the mean distance of the values that have a partner."""
    pairs = [abs(x - y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=False)]
    return fmean(pairs)


def measured(world: World, case: Case) -> dict[str, Any]:
    record = recorded(world, case)
    documents = len(record.prompts)
    how = "rows" if case.how == "rows" else "padded"
    moved = []
    for factor in case.factors:
        if factor.side == "trainer":
            ids = record.completions
            base = scored(world, case.model, truth(case, "trainer", documents, []), record.prompts, ids, how)[0]
            alone = scored(world, case.model, truth(case, "trainer", documents, [factor]), record.prompts, ids, how)[0]
        else:
            plain = truth(case, "sampler", documents, [])
            read = record.completions if factor.name == "tokenisation" else record.engine_ids
            base = scored(world, case.model, plain, record.prompts, read, how)[0]
            settings = truth(case, "sampler", documents, [factor])
            alone = scored(world, case.model, settings, record.prompts, record.engine_ids, how)[0]
        if factor.true.get("offset") == "next":
            base, alone = [row[:-1] for row in base], [row[:-1] for row in alone]
        moved.append(distance(base, alone))
    other = "rows" if case.how in ("padded", "kernel") else "padded"
    again = scored(world, case.model, record.true, record.prompts, record.engine_ids, other)[0]
    values = record.values
    if any(one.true.get("offset") == "next" and one.side == "sampler" for one in case.factors):
        again, values = [row[:-1] for row in again], [row[:-1] for row in values]
    return {"moved": [float(f"{x:.3g}") for x in moved], "noise": float(f"{distance(values, again):.3g}")}


def complaints(case: Case, row: dict[str, Any]) -> list[str]:
    """Return how a case breaks the protocol."""
    out = []
    for factor, moved in zip(case.factors, row["moved"], strict=True):
        of_rounding = factor.name in ROUNDING or (factor.name == LORA and "merged" in factor.true["lora"])
        if of_rounding and case.how != "rows" and not case.undecidable:
            out.append(f"{factor.name} is of rounding and not scored in rows")
        if (not of_rounding and moved < 5 * row["noise"]) or moved == 0:
            out.append(f"{factor.name} moves {moved}, noise {row['noise']}")
    if min(row["moved"]) * 20 < max(row["moved"]):
        out.append(f"unequal {row['moved']}")
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    world = World(Path(sys.argv[1]) / "models")
    only = sys.argv[2:]
    results = {}
    for one in sorted(CASES, key=lambda one: one.model):
        if only and one.id not in only:
            continue
        results[one.id] = measured(world, one)
        print(one.id, results[one.id], *complaints(one, results[one.id]), sep="  ", flush=True)
    if not only:
        write(Path(__file__).parent, results)
