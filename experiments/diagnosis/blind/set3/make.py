"""make.py OUT [part of an id]: all records.  make.py --check [part of an id]: measures movement and pairs, and writes them to the files."""
import sys
import time
import traceback
import warnings
from pathlib import Path

import yaml

warnings.filterwarnings("ignore")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from loops import LOOPS  # noqa: E402

FAULTS, PAIRS = (yaml.safe_load((HERE / name).read_text()) for name in ("faults.yaml", "right_pairs.yaml"))
OTHER = {"grpo": {"micro": 2}, "ppo": {"micro": 2}, "gspo": {"micro_bs": 2}, "dpo": {"micro": 1}, "sft": {"rows": 2},
         "reinforce": {"mbs": 4}, "distill": {"bs": 4}}


def apart(x, y):
    square = lambda d: sum(float((v.double() ** 2).sum()) for v in d.values())  # noqa: E731
    both = {k: (x[k] if k in x else 0 * y[k]) - (y[k] if k in y else 0 * x[k]) for k in {**x, **y}}
    return (square(both) / max(square(x), 1e-30)) ** 0.5


def distance(a, b):
    return max(apart(x, y) for x, y in zip(a[0], b[0])), apart(a[1], b[1])


def save(name, rows):
    path = HERE / name
    head = "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))
    path.write_text(head + yaml.safe_dump(rows, sort_keys=False, width=160))


def check(part):
    for f in FAULTS:
        if part in f["id"]:
            run = lambda s, fault: LOOPS[f["kind"]](s, fault, f["seed"], "float32", None)  # noqa: B023, E731
            right = run(f["settings"], None)
            g, w = distance(right, run(f["settings"], f["fault"]))
            ng, nw = distance(right, run(f["settings"] | OTHER[f["kind"]] | {"order": 5}, None))
            f["moved"] = {k: float(f"{v:.2g}") for k, v in dict(gradient=g, weights=w, noise_gradient=ng, noise_weights=nw).items()}
            bad = g < 10 * ng and w < 10 * nw
            print(f["id"], f["moved"], "TOO SMALL" if bad else "", flush=True)
    for p in PAIRS:
        if part in f"pairs/{p['n']}":
            g, w = distance(*(LOOPS[p["kind"]](p[x], None, p["seed"], "float32", None) for x in "ab"))
            p["apart"] = float(f"{g:.2g}")
            print("pair", p["n"], p["kind"], p["what"], p["apart"], f"weights {w:.2g}", "NO PAIR" if g > 1e-4 else "", flush=True)
    save("faults.yaml", FAULTS)
    save("right_pairs.yaml", PAIRS)


def make(out, part):
    start, errors, n = time.time(), [], 0
    jobs = [(f["id"], [("right", f["settings"], None), ("wrong", f["settings"], f["fault"])], f) for f in FAULTS]
    jobs += [(f"pairs/{p['n']}", [("a", p["a"], None), ("b", p["b"], None)], p) for p in PAIRS]
    for precision in ("float32", "bf16"):
        for mode in ("rich", "poor"):
            for name, runs, job in jobs:
                for side, settings, fault in runs if part in name else []:
                    folder = out / f"{precision}-{mode}" / name / side
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    n += 1
                    try:
                        LOOPS[job["kind"]](settings, fault, job["seed"], precision, (str(folder), mode))
                    except Exception:  # noqa: BLE001
                        errors.append(f"{folder.relative_to(out)}\n{traceback.format_exc()}\n")
    if errors:
        (out / "errors.txt").write_text("".join(errors))
    print(f"{n} runs, {len(errors)} errors, {time.time() - start:.0f} s, {time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    first, rest = sys.argv[1], (sys.argv[2] if len(sys.argv) > 2 else "")
    check(rest) if first == "--check" else make(Path(first), rest)
