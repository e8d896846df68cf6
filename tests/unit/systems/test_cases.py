"""Numbers of the systems themselves: every case of the project's own copy, by system and case.

A case whose system cannot be replayed yet fails; nothing is skipped. Outputs that a system computes wrongly (said by
the case) are not asked for.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from workbench.systems.replays import replay

CASES = Path(__file__).parents[2] / "cases"
BAR = 1e-9


@cache
def index(system):
    return {case["id"]: case for case in json.loads((CASES / system / "index.json").read_text())["cases"]}


ALL = [(folder.name, name) for folder in sorted(CASES.iterdir()) if folder.is_dir() for name in index(folder.name)]


def test_none_is_lost():
    assert len(ALL) == 213
    assert len(set(ALL)) == 213


def close(found, expected):
    expected = np.asarray(expected, dtype=np.float64)
    found = np.asarray(found, dtype=np.float64)
    assert found.shape == expected.shape
    same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        return same | (np.abs(found - expected) <= BAR * np.maximum(1, np.abs(expected)))


@pytest.mark.parametrize(("system", "name"), ALL, ids=[f"{s}-{n}" for s, n in ALL])
def test_case(system, name):
    case = index(system)[name]
    with np.load(CASES / system / case["file"]) as arrays:
        inputs = {key[3:]: arrays[key] for key in arrays if key.startswith("in.")}
        outputs = {key[4:]: arrays[key] for key in arrays if key.startswith("out.")}
    suspect = set(case.get("suspect", ()))
    measured = dict(zip(case.get("metric_names", ()), outputs.pop("metrics", ()), strict=True))
    if "metrics" in suspect:
        measured = {}
    result = replay(system, case["kind"], case["function"], case["config"], inputs)
    for key in outputs.keys() - suspect:
        assert close(result[key], outputs[key]).all(), f"{key}: {result[key]} is not {outputs[key]}"
    asked = {key: value for key, value in measured.items() if f"metrics.{key}" not in suspect}
    assert asked.keys() <= result["metrics"].keys()
    wrong = {
        key: (result["metrics"][key], value)
        for key, value in asked.items()
        if not close(result["metrics"][key], value).all()
    }
    assert wrong == {}
