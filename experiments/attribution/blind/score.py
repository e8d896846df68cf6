"""Score attribute on a blind set: ``python -m experiments.attribution.blind.score SET [--once]``.

Attributes every planted and every clean case as it is. ``--once`` writes the set's ``scores.json``, and refuses if
there is one: what a set scores after that is on view; see README.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import workbench as wb
from workbench.atomic import to_json, write_whole
from workbench.errors import SpecError, WorkbenchError

FOLDER = Path(__file__).parent
SCORES = "scores.json"


def score(folder: Path) -> dict[str, Any]:
    """Score a set: causes, rest and alarms of every case.

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
        rows = []
        for name, about in planted.items():
            result = _attribute(cases / "planted" / name)
            rows.append(
                {"id": name, "size": about["size"], "expected": expected[name], **judged(result, about, expected[name])}
            )
        clean = [{"case": path.name, **_attribute(path)} for path in sorted((cases / "clean").iterdir())]
    return {"planted": rows, "clean": clean}


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
    """True if a clean case was refused, has a cause, or raises an alarm."""
    return row["verdict"] in ("refused", "unsound") or bool(row["causes"] or row["alarms"])


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
        "rest_at_floor": sum(not row["alarms"] and row["verdict"] != "refused" for row in planted),
        "clean": len(clean),
        "accused": sum(accused(row) for row in clean),
    }


def main(arguments: Sequence[str]) -> None:
    """Score a set and print what was missed; with ``--once`` write its scores, the one time.

    Raises:
        SpecError: the set was scored already.
    """
    folder = FOLDER / arguments[0]
    once = "--once" in arguments[1:]
    if once and (folder / SCORES).exists():
        raise SpecError(
            f"score the set {folder.name} once",
            found=f"{SCORES} of an earlier time",
            rule="a set is blind one time; later scores are on view",
            fix="leave --once out",
        )
    scores = score(folder)
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
