"""Make the records of the set, or measure its faults and pairs.

make.py OUT [part of an id]: all records, OUT/<precision>-<mode>/<fault>/{right,wrong} and .../pairs/<n>/{a,b}.
make.py --check [part of an id]: measures movements and pairs, and writes them to the yaml files.

A run that several folders need (one loop, seed and layout without a fault) is made once and copied.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
import yaml  # noqa: E402

from common import Gradients, Run  # noqa: E402

# other divisions of the right run: their largest distance is the rounding noise of a loop
OTHERS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"micro": 1}, {"order": 9, "width": 72}],
    "grpo": [{"micro": 2}, {"order": 9}],
    "cispo": [{"ranks": 1, "width": 50}, {"order": 9}],
    "ppo": [{"micro": 2}, {"order": 9}],
    "dpo": [{"micro": 1}, {"order": 9}],
    "distil": [{"micro": 2}, {"order": 9}],
    "lm": [{"micro": 1}, {"order": 9}],
}


def loop(kind: str, run: Run) -> Gradients:
    """Run a loop."""
    return getattr(importlib.import_module(kind), kind)(run)


def read(name: str) -> list[dict[str, Any]]:
    return yaml.safe_load((HERE / name).read_text())


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows, and keep the comment above them."""
    path = HERE / name
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    body = yaml.safe_dump(rows, sort_keys=False, width=140, allow_unicode=True)
    path.write_text("\n".join([*head, body]))


def short(x: float) -> float:
    return float(f"{x:.2g}")


def apart(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> float:
    """Relative distance of two sets of tensors; one that is missing is zero."""

    def square(d: dict[str, torch.Tensor]) -> float:
        return sum(float((v.double() ** 2).sum()) for v in d.values())

    both = {k: x[k] - y[k] if k in x and k in y else x.get(k, y.get(k)) for k in {**x, **y}}
    return (square(both) / max(square(x), 1e-30)) ** 0.5


def distances(a: Gradients, b: Gradients) -> list[float]:
    assert len(a) == len(b)
    return [apart(x, y) for x, y in zip(a, b, strict=True)]


def check(part: str) -> None:
    """Measure every fault in each step, against the noise of its loop in the same step."""
    faults, pairs = read("faults.yaml"), read("right_pairs.yaml")
    made: dict[str, Any] = {}

    def one(kind: str, precision: str, fault: str | None, seed: int, layout: dict[str, Any]) -> Gradients:
        key = str((kind, precision, fault, seed, sorted(layout.items())))
        if key not in made:
            made[key] = loop(kind, Run(None, precision, True, fault, seed, layout))
        return made[key]

    for row in faults:
        if part not in row["id"]:
            continue
        row["moved"] = {}
        for precision in ("float32", "bf16"):
            kind, seed = row["kind"], row["seed"]
            right = one(kind, precision, None, seed, {})
            noise = [max(z) for z in zip(*(distances(right, one(kind, precision, None, seed, x)) for x in OTHERS[kind]))]
            moved = distances(right, one(kind, precision, row["fault"], seed, row["settings"]))
            best = max(range(len(moved)), key=lambda s: moved[s] / max(noise[s], 1e-9))
            times = moved[best] / max(noise[best], 1e-9)
            row["moved"][precision] = {
                "step": best,
                "gradient": short(moved[best]),
                "noise": short(noise[best]),
                "times": short(times),
            }
            print(row["id"], precision, [short(x) for x in moved], [short(x) for x in noise], "" if times >= 10 else "LOW")
        save("faults.yaml", faults)
    for row in pairs:
        if part not in row["id"]:
            continue
        row["moved"] = {}
        for precision in ("float32", "bf16"):
            a, b = (one(row["kind"], precision, None, row["seed"], row[x]) for x in "ab")
            row["moved"][precision] = short(max(distances(a, b)))
        print(row["id"], row["a"], row["b"], row["moved"], flush=True)
        save("right_pairs.yaml", pairs)


def make(out: Path, part: str) -> None:
    """Write all records."""
    start, failed, count, copied = time.time(), 0, 0, 0
    for precision in ("float32", "bf16"):
        for mode in ("rich", "poor"):
            top = out / f"{precision}-{mode}"
            jobs: list[tuple[dict[str, Any], Path, str | None, dict[str, Any]]] = []
            for row in read("faults.yaml"):
                jobs += [(row, top / row["id"] / "right", None, row["settings"])]
                jobs += [(row, top / row["id"] / "wrong", row["fault"], row["settings"])]
            for n, row in enumerate(read("right_pairs.yaml")):
                jobs += [(row, top / "pairs" / str(n) / x, None, row[x]) for x in "ab"]
            made: dict[str, Path] = {}
            for row, folder, fault, layout in jobs:
                if part not in row["id"]:
                    continue
                folder.parent.mkdir(parents=True, exist_ok=True)
                key = str((row["kind"], row["seed"], fault, sorted(layout.items())))
                if key in made:
                    shutil.copytree(made[key], folder)
                    copied += 1
                    continue
                try:
                    loop(row["kind"], Run(folder, precision, mode == "rich", fault, row["seed"], layout))
                    made[key] = folder
                    count += 1
                except Exception:
                    failed += 1
                    print("FAILED", folder)
                    traceback.print_exc()
            print(top.name, count, f"{time.time() - start:.0f} s", flush=True)
    processor = sum(os.times()[:4])
    print(f"{count} runs, {copied} copies, {failed} failed, {processor:.0f} s of processor time")


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = [*sys.argv[1:], ""]
    if given[0] == "--check":
        check(given[1])
    else:
        make(Path(given[0]), given[1])
