"""Make the records of the set, or measure its faults and pairs.

make.py OUT [part of an id]: all records, OUT/<precision>-<mode>/<fault>/{right,wrong} and .../pairs/<n>/{a,b}.
make.py --check [part of an id]: measures movements and pairs, and writes them to the yaml files.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import yaml

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.filterwarnings("ignore")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402

from common import Run  # noqa: E402

LOOPS = ("grpo", "ddp", "ppo", "packed", "dpo", "sft", "moe")
# other divisions of the right run: their distance is the rounding noise of a loop
OTHERS: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"micro": 2}, {"order": 9}],
    "ddp": [{"micro": 2}, {"order": 9}],
    "ppo": [{"micro": 1}, {"order": 9}],
    "packed": [{"width": 60}, {"order": 9}],
    "dpo": [{"micro": 1}, {"order": 9}],
    "sft": [{"micro": 3}, {"order": 9}],
    "moe": [{"micro": 5}, {"order": 9}],
}


def loop(kind: str, run: Run) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Run a loop."""
    return getattr(importlib.import_module(kind), kind)(run)


def one(row: dict[str, Any], precision: str, fault: str | None, layout: dict[str, Any]) -> Any:
    """Run a fault's loop without a record."""
    return loop(row["kind"], Run(None, precision, True, fault, row["seed"], layout))


def apart(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> float:
    """Relative distance of two sets of tensors; one that is missing is zero."""
    square = lambda d: sum(float((v.double() ** 2).sum()) for v in d.values())  # noqa: E731
    both = {k: x[k] - y[k] if k in x and k in y else x.get(k, y.get(k)) for k in {**x, **y}}
    return (square(both) / max(square(x), 1e-30)) ** 0.5


def distance(a: Any, b: Any) -> tuple[float, float]:
    """Largest distance of the gradients of a step, and that of the last weights."""
    return max(apart(x, y) for x, y in zip(a[0], b[0], strict=True)), apart(a[1], b[1])


def short(x: float) -> float:
    """Two digits."""
    return float(f"{x:.2g}")


def read(name: str) -> list[dict[str, Any]]:
    """Entries of a yaml file."""
    return yaml.safe_load((HERE / name).read_text())


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Write a yaml file under its comments."""
    path = HERE / name
    head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    path.write_text(head + yaml.safe_dump(rows, sort_keys=False, width=160))


def check(part: str) -> None:
    """Measure movements and pairs in both precisions; the noise is that of other divisions of the right run."""
    faults, pairs = read("faults.yaml"), read("right_pairs.yaml")
    for row in faults:
        if part not in row["id"]:
            continue
        moved = {}
        for precision in ("float32", "bf16"):
            run = functools.partial(one, row, precision)
            right = run(None, row["settings"])
            noises = [distance(right, run(None, {**row["settings"], **other})) for other in OTHERS[row["kind"]]]
            gradient, weights = distance(right, run(row["fault"], row["settings"]))
            values = {
                "gradient": gradient,
                "weights": weights,
                "noise_gradient": max(n[0] for n in noises),
                "noise_weights": max(n[1] for n in noises),
            }
            moved[precision] = {k: short(v) for k, v in values.items()}
        row["moved"] = moved
        wide = moved["float32"]
        flag = "" if wide["gradient"] >= 10 * wide["noise_gradient"] else "  TOO SMALL"
        print(row["id"], moved, flag, flush=True)
        save("faults.yaml", faults)
    for row in pairs:
        if part not in row["id"]:
            continue
        row["moved"] = {}
        for precision in ("float32", "bf16"):
            a, b = (loop(row["kind"], Run(None, precision, True, None, row["seed"], row[x])) for x in "ab")
            row["moved"][precision] = short(distance(a, b)[0])
        print(row["id"], row["moved"], flush=True)
        save("right_pairs.yaml", pairs)


def make(out: Path, part: str) -> None:
    """Write all records."""
    start, failed, count = time.time(), 0, 0
    for precision in ("float32", "bf16"):
        for mode in ("rich", "poor"):
            top = out / f"{precision}-{mode}"
            jobs = []
            for row in read("faults.yaml"):
                for name, fault in (("right", None), ("wrong", row["fault"])):
                    jobs.append((row, top / row["id"] / name, fault, row["settings"]))
            for n, row in enumerate(read("right_pairs.yaml")):
                jobs += [(row, top / "pairs" / str(n) / x, None, row[x]) for x in "ab"]
            for row, folder, fault, layout in jobs:
                if part not in row["id"]:
                    continue
                folder.parent.mkdir(parents=True, exist_ok=True)
                try:
                    loop(row["kind"], Run(folder, precision, mode == "rich", fault, row["seed"], layout))
                    count += 1
                except Exception:
                    failed += 1
                    print("FAILED", folder)
                    traceback.print_exc()
            print(top.name, count, f"{time.time() - start:.0f} s", flush=True)
    processor = sum(os.times()[:4])
    print(f"{count} runs, {failed} failed, {processor:.0f} s of processor time")


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = [*sys.argv[1:], ""]
    if given[0] == "--check":
        check(given[1])
    else:
        make(Path(given[0]), given[1])
