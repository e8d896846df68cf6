"""Score check on a blind set: ``python -m experiments.checked_steps.blind.score SET [--once]``.

Checks every dump of a mistake and every clean dump with the settings that the dump has. ``--once`` writes the set's
``scores.json``, and refuses if there is one: what a set scores after that is on view; see README.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
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
MOST = 6
"""Causes of a dump that are kept in the scores."""


def score(folder: Path) -> dict[str, Any]:
    """Score a set: verdict and causes of every dump.

    Raises:
        SpecError: mistakes, expected causes and dumps are not those of one set.
    """
    faults = [fault["id"] for fault in yaml.safe_load((folder / "faults.yaml").read_text())]
    expected = yaml.safe_load((folder / "expected.yaml").read_text())
    with dumps_of(folder) as dumps:
        written = {path.name for path in (dumps / "faults").iterdir()}
        if off := sorted(({*faults} ^ {*expected}) | ({*faults} ^ written)):
            raise SpecError(
                f"score the set {folder.name}",
                found=f"{', '.join(off)} in some of faults.yaml, expected.yaml and the dumps, not in all",
                rule="each mistake has its expected causes and its dump",
                fix="complete the set before it is scored",
            )
        of_faults = []
        for name in faults:
            checked = _check(dumps / "faults" / name)
            rank = next((at for at, cause in enumerate(checked["causes"], 1) if is_right(cause, expected[name])), None)
            of_faults.append({"id": name, "rank": rank, "expected": expected[name], **checked})
        clean = [{"dump": path.name, **_check(path)} for path in sorted((dumps / "clean").iterdir())]
    return {"faults": of_faults, "clean": clean}


@contextmanager
def dumps_of(folder: Path) -> Iterator[Path]:
    """Give the folder of a set's dumps: the saved one, or one that its make.py writes for the time being."""
    if (folder / "dumps").is_dir():
        yield folder / "dumps"
        return
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "dumps"
        subprocess.run([sys.executable, str(folder / "make.py"), str(out)], check=True, stdout=subprocess.DEVNULL)
        yield out


def is_right(cause: Mapping[str, str], expected: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if one of the expected causes fits: kind, stage if it is given, and all words."""
    text = cause["description"].lower()
    return any(
        one["kind"] == cause["kind"]
        and one.get("stage", cause["stage"]) == cause["stage"]
        and all(str(word).lower() in text for word in one.get("words", ()))
        for one in expected
    )


def _check(dump: Path) -> dict[str, Any]:
    try:
        checked = wb.check_step(dump)
    except WorkbenchError as error:
        return {"verdict": "refused", "first": None, "causes": [], "found": str(error.parts["found"])[:200]}
    causes = [{"kind": one.kind, "description": one.description, "stage": one.stage} for one in checked.causes[:MOST]]
    return {"verdict": checked.verdict, "first": checked.first and checked.first.name, "causes": causes}


def summary(scores: Mapping[str, Any]) -> dict[str, int]:
    """Count the mistakes that were named first, in the first three, and seen at all, and the clean dumps accused."""
    faults, clean = scores["faults"], scores["clean"]
    return {
        "faults": len(faults),
        "first": sum(row["rank"] == 1 for row in faults),
        "in_three": sum((row["rank"] or MOST + 1) <= 3 for row in faults),
        "differs": sum(row["verdict"] in ("differs", "refused") for row in faults),
        "clean": len(clean),
        "accused": sum(row["verdict"] in ("differs", "refused") for row in clean),
        "vacuous": sum(row["verdict"] == "vacuous" for row in clean),
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
    for row in scores["faults"]:
        if row["rank"] != 1:
            first = row["causes"][0] if row["causes"] else {"kind": row["verdict"], "description": row["first"]}
            print(f"{row['id']}: rank {row['rank']}; named {first['kind']}: {first['description']}")
    for row in scores["clean"]:
        if row["verdict"] != "agrees":
            print(f"clean {row['dump']}: {row['verdict']} {row['first'] or row.get('found', '')}")
    print(summary(scores))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SpecError as error:
        sys.exit(str(error))
