"""Writes all records: make.py OUT [part of an id]; `--check` measures movement of faults and equality of pairs instead."""
import json, pathlib, sys, traceback, warnings
import torch, yaml
import loops
torch.set_num_threads(1); warnings.filterwarnings("ignore")
HERE = pathlib.Path(__file__).parent
FAULTS = yaml.safe_load((HERE / "faults.yaml").read_text())
PAIRS = yaml.safe_load((HERE / "right_pairs.yaml").read_text()) if (HERE / "right_pairs.yaml").exists() else []


def apart(a, b):
    """Largest relative distance of the steps' gradients, and of the final weights."""
    def rel(x, y):
        keys = x.keys() | y.keys()
        zero = lambda k: torch.zeros_like((x if k in x else y)[k])
        diff = sum(float((x.get(k, zero(k)) - y.get(k, zero(k))).double().square().sum()) for k in keys)
        return (diff / sum(float(v.double().square().sum()) for v in x.values())) ** 0.5
    return max(rel(x, y) for x, y in zip(a[0], b[0])), rel(a[1], b[1])


def noise_settings(f):
    s = f["settings"]
    return s | dict(order="given" if s.get("order") == "reversed" else "reversed", micro=s.get("micro", 3) + 1)


def check(precision="float32"):
    moved = {}
    for f in FAULTS:
        run = lambda s, fault: loops.LOOPS[f["kind"]](s, fault, f["seed"], precision)
        right = run(f["settings"], None)
        wrong, noise = apart(right, run(f["settings"], f["fault"])), apart(right, run(noise_settings(f), None))
        moved[f["id"]] = dict(gradient=float(f"{wrong[0]:.2g}"), weights=float(f"{wrong[1]:.2g}"), noise_gradient=float(f"{noise[0]:.2g}"),
                              noise_weights=float(f"{noise[1]:.2g}"))
        print(f["id"], moved[f["id"]], "" if wrong[0] > 10 * noise[0] or wrong[1] > 10 * noise[1] else "BELOW")
    return moved


def write(out, part=""):
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for precision in ("float32", "bf16"):
        for mode in ("rich", "poor"):
            base = out / f"{precision}-{mode}"
            jobs = [(base / f["id"] / w, f["kind"], f["settings"], f["fault"] if w == "wrong" else None, f["seed"]) for f in FAULTS for w in ("right", "wrong")]
            jobs += [(base / "pairs" / str(p["n"]) / w, p["kind"], p[w], None, p["seed"]) for p in PAIRS for w in "ab"]
            for folder, kind, settings, fault, seed in jobs:
                if part not in str(folder):
                    continue
                try:
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    loops.LOOPS[kind](settings, fault, seed, precision, (folder, mode))
                except Exception:
                    with open(out / "errors.txt", "a") as f:
                        f.write(f"{folder.relative_to(out)}\n{traceback.format_exc(limit=-4)}\n")


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        print(json.dumps(check(*sys.argv[2:3])))
    else:
        write(*sys.argv[1:])
