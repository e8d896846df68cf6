"""make.py OUT [part of an id]: all records.  make.py --check [part of an id]: measures movements and pairs, and writes them to the files."""
import sys
import time
import traceback
import warnings
from pathlib import Path

import yaml

warnings.filterwarnings("ignore")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import rl  # noqa: E402
import sl  # noqa: E402

LOOPS = {"grpo": rl.grpo, "ppo": rl.ppo, "pack": rl.pack, "dpo": sl.dpo, "sft": sl.sft, "rloo": rl.rloo, "moe": sl.moe}
FAULTS, PAIRS = (yaml.safe_load((HERE / name).read_text()) for name in ("faults.yaml", "right_pairs.yaml"))
# other divisions of the right run: their distance is the rounding noise of a loop
OTHERS = {"grpo": [{"micro": 2}, {"order": 9}], "ppo": [{"micro": 2}, {"order": 9}], "pack": [{"row": 80}, {"order": 9}], "dpo": [{"micro": 1}, {"order": 9}],
          "sft": [{"row": 80}, {"order": 9}], "rloo": [{"micro": 2}, {"order": 9}], "moe": [{"micro": 2}, {"order": 9}]}


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


def short(x):
    return float(f"{x:.2g}")


def check(part):
    for f in FAULTS:
        if part not in f["id"]:
            continue
        run = lambda fault, **more: LOOPS[f["kind"]]({**f["settings"], **more}, fault, f["seed"], "float32", None)  # noqa: B023, E731
        right = run(None)
        moved = distance(right, run(f["fault"]))
        noise = [max(v) for v in zip(*(distance(right, run(None, **o)) for o in OTHERS[f["kind"]]))]
        f["moved"] = dict(zip(("gradient", "weights", "noise_gradient", "noise_weights"), map(short, (*moved, *noise))))
        few = moved[0] < 10 * noise[0] and moved[1] < 10 * noise[1]
        print(f"{f['id']:28}", *(f"{v:.2g}" for v in (*moved, *noise)), "TOO SMALL" if few else "", flush=True)
    save("faults.yaml", FAULTS)
    for p in PAIRS:
        if part not in p["kind"] and part:
            continue
        a, b = (LOOPS[p["kind"]](p[side], None, p["seed"], "float32", None) for side in "ab")
        found = distance(a, b)
        p["apart"] = short(found[0])
        print(f"pair {p['n']:3} {p['kind']:5} {p['what']:44} {found[0]:.2g} {found[1]:.2g}", "FAR" if found[0] > 1e-4 else "", flush=True)
    save("right_pairs.yaml", PAIRS)


def make(out, part):
    errors = 0
    for precision in ("float32", "bf16"):
        for mode in ("rich", "poor"):
            base = out / f"{precision}-{mode}"
            jobs = [(f["id"], f["kind"], f["seed"], (("right", f["settings"], None), ("wrong", f["settings"], f["fault"]))) for f in FAULTS]
            jobs += [(f"pairs/{p['n']}", p["kind"], p["seed"], (("a", p["a"], None), ("b", p["b"], None))) for p in PAIRS]
            for name, kind, seed, runs in jobs:
                for side, settings, fault in runs:
                    if part not in name:
                        continue
                    try:
                        LOOPS[kind](settings, fault, seed, precision, base / name / side, mode)
                    except Exception:
                        errors += 1
                        print(precision, mode, name, side)
                        traceback.print_exc()
    return errors


if __name__ == "__main__":
    part = sys.argv[2] if len(sys.argv) > 2 else ""
    if sys.argv[1] == "--check":
        check(part)
    else:
        start = time.time()
        failed = make(Path(sys.argv[1]), part)
        print(f"{time.time() - start:.0f} s, {failed} errors")
        sys.exit(bool(failed))
