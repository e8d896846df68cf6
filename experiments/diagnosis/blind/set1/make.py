"""python make.py OUT: writes every record, OUT/<precision>-<mode>/<fault id>/{right,wrong}/ and OUT/<precision>-<mode>/pairs/<n>/{a,b}/.
Whatever the recorder refuses is listed in OUT/errors.txt and the rest goes on."""
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
from loops import LOOPS  # noqa: E402


def main():
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    faults = yaml.safe_load((HERE / "faults.yaml").read_text())
    pairs = yaml.safe_load((HERE / "right_pairs.yaml").read_text())
    start, done, errors = time.time(), 0, []
    for precision in ("float32", "bf16"):
        for mode in ("rich", "poor"):
            base = out / f"{precision}-{mode}"
            jobs = []
            for f in faults:
                jobs.append((f["kind"], f["settings"], None, f["seed"], base / f["id"] / "right"))
                jobs.append((f["kind"], f["settings"], f["fault"], f["seed"], base / f["id"] / "wrong"))
            for p in pairs:
                jobs.append((p["kind"], p["a"], None, p["seed"], base / "pairs" / p["n"] / "a"))
                jobs.append((p["kind"], p["b"], None, p["seed"], base / "pairs" / p["n"] / "b"))
            for kind, settings, fault, seed, folder in jobs:
                folder.parent.mkdir(parents=True, exist_ok=True)
                try:
                    LOOPS[kind](settings, fault, seed, precision, (folder, mode))
                    done += 1
                except Exception:
                    errors.append(f"{folder}\n{traceback.format_exc()}")
            print(f"{precision}-{mode}: {len(jobs)} runs, {time.time() - start:.0f} s", flush=True)
    if errors:
        (out / "errors.txt").write_text("\n".join(errors))
    print(f"{done} records, {len(errors)} errors, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
