"""Write every record: ``python make.py OUT``; measure what faults and layouts move: ``python make.py --check``."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from common import Run  # noqa: E402

warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")


def read(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load((HERE / name).read_text())


def loop(kind: str, run: Run) -> None:
    torch.manual_seed(run.seed)
    importlib.import_module(kind).train(run)


def make(out: Path, part: str = "") -> None:
    start, made, failed = time.time(), 0, 0
    faults, pairs = read("faults.yaml"), read("right_pairs.yaml")
    for precision in ("float32", "bf16"):
        for form in ("rich", "poor"):
            top = out / f"{precision}-{form}"
            jobs = [
                (r, top / r["id"] / s, r["fault"] if s == "wrong" else None, {})
                for r in faults
                for s in ("right", "wrong")
            ]
            jobs += [(r, top / "pairs" / str(n) / s, None, r[s]) for n, r in enumerate(pairs) for s in "ab"]
            done: dict[str, Path] = {}
            for row, folder, fault, layout in jobs:
                if part not in row["id"]:
                    continue
                folder.parent.mkdir(parents=True, exist_ok=True)
                key = str((row["kind"], row["seed"], fault, sorted(layout.items())))
                if key in done:
                    shutil.copytree(done[key], folder)
                    continue
                try:
                    loop(row["kind"], Run(folder, precision, form == "rich", fault, row["seed"], layout))
                    done[key] = folder
                    made += 1
                except Exception:
                    failed += 1
                    print("FAILED", folder)
                    traceback.print_exc()
            print(top.name, made, f"{time.time() - start:.0f} s", flush=True)
    print(f"{made} runs, {failed} failed, {sum(os.times()[:2]):.0f} s of processor time")
    if failed:
        sys.exit(1)


# --- check -------------------------------------------------------------------------------------------------------


def measured(row: dict[str, Any], precision: str, fault: str | None, layout: dict[str, Any]) -> Run:
    with tempfile.TemporaryDirectory() as temporary:
        run = Run(Path(temporary) / "record", precision, False, fault, row["seed"], layout, keep=[], losses=[])
        loop(row["kind"], run)
    return run


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative distance of two gradients, a the right one; a missing one counts as zero."""
    off = sum(
        ((a.get(n, 0 * b.get(n, a.get(n))) - b.get(n, 0 * a.get(n, b.get(n)))) ** 2).sum().item() for n in {**a, **b}
    )
    return (off / max(sum((x**2).sum().item() for x in a.values()), 1e-24)) ** 0.5


def distances(a: Run, b: Run) -> list[float]:
    assert a.keep is not None
    assert b.keep is not None
    return [apart(x, y) for x, y in zip(a.keep, b.keep, strict=True)]


def short(x: float) -> float:
    return float(f"{x:.2g}")


def check(part: str = "") -> None:
    """Write measured.yaml: of faults the step that stands out most, of pairs the largest distance."""
    faults, pairs = read("faults.yaml"), read("right_pairs.yaml")
    kept = HERE / "measured.yaml"
    found: dict[str, Any] = yaml.safe_load(kept.read_text()) if kept.exists() else {"faults": {}, "pairs": {}}
    for row in faults:
        if part not in row["id"]:
            continue
        mine: dict[str, Any] = {}
        found["faults"][row["id"]] = mine
        for precision in ("float32", "bf16"):
            right = measured(row, precision, None, {})
            wrong = distances(right, measured(row, precision, row["fault"], {}))
            layouts = [p["b"] for p in pairs if p["kind"] == row["kind"]][:4]
            others = [distances(right, measured(row, precision, None, x)) for x in layouts]
            noise = [max(x[n] for x in others) for n in range(len(wrong))]
            times = [w / max(x, 1e-12) for w, x in zip(wrong, noise, strict=True)]
            at = max(range(len(times)), key=times.__getitem__)
            mine[precision] = {
                "step": at,
                "gradient": short(wrong[at]),
                "noise": short(noise[at]),
                "times": short(times[at]),
            }
            if times[at] < 10:
                print("LOW", row["id"], precision, mine[precision])
    for row in pairs:
        if part not in row["id"]:
            continue
        moved = {}
        for precision in ("float32", "bf16"):
            a, b = measured(row, precision, None, row["a"]), measured(row, precision, None, row["b"])
            losses = max(abs(x - y) / max(abs(x), 1e-2) for x, y in zip(a.losses or [], b.losses or [], strict=True))
            moved[precision] = {"gradient": short(max(distances(a, b))), "loss": short(losses)}
            bound = 1e-4 if precision == "float32" else 0.15
            if max(moved[precision].values()) > bound:
                print("FAR", row["id"], row["a"], row["b"], precision, moved[precision])
        found["pairs"][row["id"]] = moved
    kept.write_text(yaml.safe_dump(found, sort_keys=False))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = [*sys.argv[1:], ""]
    if given[0] == "--check":
        check(given[1])
    else:
        make(Path(given[0]), given[1])
