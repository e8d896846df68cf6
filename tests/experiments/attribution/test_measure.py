"""The benchmark of attribution: its record and its bars, on rows by hand, and one floor."""

import pytest

from experiments.attribution import measure as module
from experiments.attribution.cases import Bench


def row(planted, causes, alarms=()):
    return {"planted": list(planted), "causes": list(causes), "alarms": dict.fromkeys(alarms, 2.0)}


def test_the_summary_counts_what_the_bars_are_about():
    planted = [
        row(["a"], ["a", "b"]),
        row(["a"], ["b", "a"], ["mean"]),
        row(["a", "b"], ["b", "a"]),
        row(["a", "b"], ["a"]),
    ]
    clean = [row([], []), row([], ["a"]), row([], [], ["shift"])]
    record = module.record_of([{"ratio": 0.9}, {"ratio": 1.05}], planted, clean, {}, 1.0)
    summary = record["summary"]
    assert (summary["singles"], summary["first"], summary["pairs"], summary["both"]) == (2, 1, 2, 1)
    assert (summary["rest_at_floor"], summary["accused"]) == (3, 2)
    assert summary["furthest_floor"] == pytest.approx(0.1)
    assert {name: bar["holds"] for name, bar in record["bars"].items()} == {
        "named first": False,
        "both named": False,
        "accused": False,
        "floor": True,
    }
    assert "1 of 2 singles" in module.format_record(record)


def test_a_floor_is_measured_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DOCUMENTS", 2)
    rows = module.both_floors(Bench("qwen3", "small", tmp_path))
    assert [row["precision"] for row in rows] == ["float32", "bfloat16", "float16"]
    assert all(0.6 < row["ratio"] < 1.6 for row in rows)


def test_the_run_over_steps_finds_the_sampler_that_is_stuck(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STEPS", 3)
    monkeypatch.setattr(module, "STUCK", 1)
    monkeypatch.setattr(module, "DRAWS", 2)
    history = module.run_over_steps(Bench("qwen3", "small", tmp_path, count=6, tokens=12))
    causes = {step: [(part.factor, part.description) for part in one.causes] for step, one in history.items()}
    assert causes == {0: [], 1: [], 2: [("stale weights", "weights of step_1")]}


def test_floors_alone_are_measured_again_and_the_rest_is_kept(monkeypatch):
    def floor(kind, precision, ratio):
        return {"kind": kind, "size": "small", "precision": precision, "ratio": ratio}

    saved = module.record_of(
        [floor("moe", "float16", 1.4), floor("qwen3", "float16", 1.05)], [row(["a"], ["a"])], [row([], [])], {}, 7.0
    )
    monkeypatch.setattr(module, "both_floors", lambda bench, _: [floor(bench.kind, "float16", 1.1)])
    record = module.floors_again(saved, ("moe",))
    assert [(one["kind"], one["ratio"]) for one in record["floors"]] == [("moe", 1.1), ("qwen3", 1.05)]
    assert record["bars"]["floor"]["holds"]
    assert not saved["bars"]["floor"]["holds"]
    assert (record["planted"], record["clean"], record["seconds"]) == (saved["planted"], saved["clean"], 7.0)


def test_a_mixture_in_float16_has_completions_enough_for_routes_that_flip():
    class Small:
        kind, size = "moe", "small"

    counts = [module.documents_of(Small, precision) for precision in ("float32", "bfloat16", "float16")]
    assert counts == [72, 72, 720]
