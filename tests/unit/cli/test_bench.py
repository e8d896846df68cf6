"""`workbench bench` and `verify` write records, and their exit codes say if every bar holds."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import launch_overhead
from workbench.cli import bench
from workbench.cli.bench import bench as main
from workbench.cli.bench import verify
from workbench.errors import SpecError
from workbench.launch import verify as verification


@pytest.fixture
def record(monkeypatch):
    """The record that the benchmark will write."""
    record = {"bars": {"ready": {"bar": 1.0, "median": 0.5, "holds": True}}}

    def measure(**wanted):
        wanted.pop("report_progress")("half way")
        return record | {"wanted": wanted}

    monkeypatch.setattr(launch_overhead, "measure", measure)
    monkeypatch.setattr(launch_overhead, "format_record", lambda record: "in words")
    return record


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_writes_the_record_and_reports_the_bars(record, tmp_path, capsys, holds, code):
    record["bars"]["ready"]["holds"] = holds
    assert main(["launch_overhead", "--folder", str(tmp_path / "new" / "folder"), "--pairs", "3"]) == code
    written = json.loads((tmp_path / "new" / "folder" / "launch_overhead.json").read_text())
    assert written["wanted"] == {"pairs": 3}
    assert written["command"].startswith("workbench bench launch_overhead")
    assert str(tmp_path) not in written["command"]
    text = capsys.readouterr().out
    assert "half way" in text
    assert "in words" in text


def test_all_are_run_if_none_is_named(record, tmp_path, monkeypatch):
    monkeypatch.setattr(
        bench, "BENCHMARKS", dict.fromkeys(["launch_overhead", "another"], ("benchmarks.launch_overhead", "?"))
    )
    assert main(["--folder", str(tmp_path)]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["another.json", "launch_overhead.json"]


def test_a_stranger_is_refused(tmp_path):
    with pytest.raises(SpecError, match="benchmark speed"):
        main(["speed", "--folder", str(tmp_path)])


@pytest.fixture
def verified(monkeypatch):
    """The arguments of the benchmark, and its record."""
    results = {"record": {"bars": {"distance": {"bar": 2.0, "found": 1.1, "holds": True}}}}

    def measure(**wanted):
        wanted.pop("report_progress")("half way")
        results["wanted"] = wanted
        return dict(results["record"])

    monkeypatch.setattr(verification, "measure", measure)
    monkeypatch.setattr(verification, "format_record", lambda record: "in words")
    return results


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_the_record_is_written_and_the_code_is_the_verdict(verified, tmp_path, capsys, holds, code):
    verified["record"]["bars"]["distance"]["holds"] = holds
    path = tmp_path / "new" / "mine.json"
    assert verify(["--gpus", "4", "--model", "qwen3-0.6b", "--steps", "9", "--record", str(path)]) == code
    assert verified["wanted"] == {"gpus": 4, "model": "qwen3-0.6b", "steps": 9, "lora_r": 0}
    written = json.loads(path.read_text())
    assert written["command"].startswith("workbench verify --gpus 4")
    assert str(tmp_path) not in written["command"]
    text = capsys.readouterr().out
    assert "half way" in text
    assert "in words" in text


@pytest.mark.parametrize("verdict", ["vacuous", "unsound baseline", "different"])
def test_only_equal_exits_well(verified, tmp_path, verdict):
    verified["record"]["verdict"] = verdict
    assert verify(["--record", str(tmp_path / "mine.json")]) == 1


@pytest.mark.parametrize(("gpus", "name"), [("2", "verify.json"), ("0", "verify_cpu.json")])
def test_a_cpu_record_does_not_replace_that_of_gpus(verified, monkeypatch, tmp_path, gpus, name):
    monkeypatch.setattr(bench, "project_root", lambda: tmp_path)
    assert verify(["--gpus", gpus]) == 0
    assert [file.name for file in (tmp_path / "experiments" / "benchmarks").iterdir()] == [name]
    assert verified["wanted"]["steps"] == 200
