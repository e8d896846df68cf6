"""Score attribute on a blind set: ``python -m experiments.attribution.blind.score SET [--once]``.

Attributes every planted and every clean case as it is. ``--once`` writes the set's ``scores.json``, and refuses if
there is one: what a set scores after that is on view; see README.md. ``--processes N`` attributes as many cases at a
time; ``--keep FILE`` appends each result to a file, and takes those that are there: two hours of a core can be
interrupted.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml

import workbench as wb
from workbench.atomic import to_json, write_whole
from workbench.errors import SpecError, WorkbenchError

FOLDER = Path(__file__).parent
SCORES = "scores.json"


def score(folder: Path, *, processes: int = 1, keep: Path | None = None) -> dict[str, Any]:
    """Score a set: causes, rest and alarms of every case.

    Args:
        folder: of the set.
        processes: that attribute cases at the same time; 1: this one.
        keep: file of results, a line each; those of an earlier time are taken.

    Raises:
        SpecError: causes, expected factors and cases are not those of one set.
    """
    planted = {one["id"]: one for one in yaml.safe_load((folder / "causes.yaml").read_text())}
    expected = yaml.safe_load((folder / "expected.yaml").read_text())
    with cases_of(folder) as cases:
        written = {path.name for path in (cases / "planted").iterdir()}
        if off := sorted(({*planted} ^ {*expected}) | ({*planted} ^ written)):
            raise SpecError(
                f"score the set {folder.name}",
                found=f"{', '.join(off)} in some of causes.yaml, expected.yaml and the cases, not in all",
                rule="each cause has its expected factors and its case",
                fix="complete the set before it is scored",
            )
        clean = sorted(path.name for path in (cases / "clean").iterdir())
        names = [*(f"planted/{name}" for name in planted), *(f"clean/{name}" for name in clean)]
        results = _attributed(cases, names, processes, keep)
    rows = [
        {
            "id": name,
            "size": about["size"],
            "expected": expected[name],
            **judged(results[f"planted/{name}"], about, expected[name]),
        }
        for name, about in planted.items()
    ]
    return {"planted": rows, "clean": [{"case": name, **results[f"clean/{name}"]} for name in clean]}


def _attributed(cases: Path, names: Sequence[str], processes: int, keep: Path | None) -> dict[str, dict[str, Any]]:
    """Results by name of a case."""
    results: dict[str, dict[str, Any]] = {}
    if keep is not None and keep.exists():
        results = {one["case"]: one["result"] for one in map(json.loads, keep.read_text().splitlines())}
    left = [name for name in names if name not in results]
    attributed = functools.partial(_named, cases)
    spawned = multiprocessing.get_context("spawn")
    with spawned.Pool(processes, torch.set_num_threads, (1,)) if processes > 1 else nullcontext() as pool:
        for name, result in map(attributed, left) if pool is None else pool.imap_unordered(attributed, left):
            results[name] = result
            if keep is not None:
                with keep.open("a") as file:
                    file.write(json.dumps({"case": name, "result": result}) + "\n")
    return results


def _named(cases: Path, name: str) -> tuple[str, dict[str, Any]]:
    return name, _attribute(cases / name)


def judged(result: Mapping[str, Any], about: Mapping[str, Any], expected: Sequence[Any]) -> dict[str, Any]:
    """Return a case's result with what it got right: the best of its expected readings counts."""
    readings = expected if expected and isinstance(expected[0], list) else [expected]
    open_factors = result["open"] if about.get("undecidable") else []
    judged = []
    for factors in readings:
        named = [one for one in result["causes"] if one in factors]
        first = bool(result["causes"][:1] and result["causes"][0] in factors) or any(f in open_factors for f in factors)
        every = all(one in (*result["causes"], *open_factors) for one in factors)
        extra = [one for one in result["causes"] if one not in factors]
        judged.append({"first": first, "all": every, "named": named, "extra": extra, "pair": len(factors) > 1})
    best = max(judged, key=lambda one: (one["all"], one["first"], -len(one["extra"])))
    return {**result, **best}


@contextmanager
def cases_of(folder: Path) -> Iterator[Path]:
    """Give the folder of a set's cases: the saved one, or one that its make.py writes for the time being."""
    if (folder / "cases").is_dir():
        yield folder / "cases"
        return
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "cases"
        subprocess.run([sys.executable, str(folder / "make.py"), str(out)], check=True, stdout=subprocess.DEVNULL)
        yield out


def _attribute(case: Path) -> dict[str, Any]:
    start = time.monotonic()
    try:
        result = wb.attribute(case)
    except WorkbenchError as error:
        return {"verdict": "refused", "causes": [], "open": [], "alarms": {}, "found": str(error.parts["found"])[:200]}
    except Exception as error:  # a defect of attribute is a result of the set
        found = f"{type(error).__name__}: {error}"[:200]
        return {"verdict": "crashed", "causes": [], "open": [], "alarms": {}, "found": found}
    rivals = [rival.partition(" (")[0] for part in result.causes for rival in part.rivals]
    return {
        "verdict": result.verdict,
        "causes": [part.factor for part in result.causes],
        "descriptions": [part.description for part in result.causes],
        "open": [*rivals, *(sentence.partition(":")[0] for sentence in result.undecided)],
        "alarms": dict(result.alarms),
        "gap": result.gap["mean_distance"],
        "rest": result.rest["mean_distance"],
        "floor": result.floor["mean"],
        "seconds": round(time.monotonic() - start, 1),
    }


def accused(row: Mapping[str, Any]) -> bool:
    """True if a clean case was refused or ended in an error, has a cause, or raises an alarm."""
    return row["verdict"] in ("refused", "crashed", "unsound") or bool(row["causes"] or row["alarms"])


def summary(scores: Mapping[str, Any]) -> dict[str, int]:
    """Count singles named first, pairs with both named, rests at the floor, and clean cases accused."""
    planted, clean = scores["planted"], scores["clean"]
    singles, pairs = ([row for row in planted if row["pair"] == pair] for pair in (False, True))
    return {
        "singles": len(singles),
        "first": sum(row["first"] for row in singles),
        "pairs": len(pairs),
        "both": sum(row["all"] for row in pairs),
        "pairs_first": sum(row["first"] for row in pairs),
        "extra": sum(bool(row["extra"]) for row in planted),
        "rest_at_floor": sum(not row["alarms"] and row["verdict"] not in ("refused", "crashed") for row in planted),
        "clean": len(clean),
        "accused": sum(accused(row) for row in clean),
    }


def main(arguments: Sequence[str]) -> None:
    """Score a set and print what was missed; with ``--once`` write its scores, the one time.

    Raises:
        SpecError: the set was scored already.
    """
    parser = argparse.ArgumentParser(prog="python -m experiments.attribution.blind.score")
    parser.add_argument("set")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args(arguments)
    folder, once = FOLDER / options.set, options.once
    if once and (folder / SCORES).exists():
        raise SpecError(
            f"score the set {folder.name} once",
            found=f"{SCORES} of an earlier time",
            rule="a set is blind one time; later scores are on view",
            fix="leave --once out",
        )
    scores = score(folder, processes=options.processes, keep=options.keep)
    if once:
        write_whole(folder / SCORES, to_json(scores))
    for row in scores["planted"]:
        if not row["all"] or not row["first"] or row["alarms"]:
            print(
                f"{row['id']}: expected {row['expected']}; named {row['causes']} {row.get('descriptions', '')}; "
                f"{row['alarms']}"
            )
    for row in scores["clean"]:
        if accused(row):
            print(f"clean {row['case']}: {row['verdict']} {row['causes']} {row['alarms']} {row.get('found', '')}")
    print(summary(scores))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SpecError as error:
        sys.exit(str(error))
