"""`workbench verify` writes a record, says a verdict, and its exit code is that verdict."""

from __future__ import annotations

import json

import pytest

from workbench.cli import verify as verb
from workbench.cli.verify import main
from workbench.launch import verify


@pytest.fixture
def asked(monkeypatch):
    """What the benchmark was asked for, and the record that it gives."""
    found = {"record": {"bars": {"distance": {"bar": 2.0, "found": 1.1, "holds": True}}}}

    def measure(**wanted):
        wanted.pop("report_progress")("half way")
        found["wanted"] = wanted
        return dict(found["record"])

    monkeypatch.setattr(verify, "measure", measure)
    monkeypatch.setattr(verify, "format_record", lambda record: "in words")
    return found


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_the_record_is_written_and_the_code_is_the_verdict(asked, tmp_path, capsys, holds, code):
    asked["record"]["bars"]["distance"]["holds"] = holds
    path = tmp_path / "new" / "mine.json"
    assert main(["--gpus", "4", "--model", "qwen3-0.6b", "--steps", "9", "--record", str(path)]) == code
    assert asked["wanted"] == {"gpus": 4, "model": "qwen3-0.6b", "steps": 9}
    written = json.loads(path.read_text())
    assert written["command"].startswith("workbench verify --gpus 4")
    assert str(tmp_path) not in written["command"]
    said = capsys.readouterr().out
    assert "half way" in said
    assert "in words" in said


@pytest.mark.parametrize("verdict", ["vacuous", "unsound baseline", "different"])
def test_only_equal_exits_well(asked, tmp_path, verdict):
    asked["record"]["verdict"] = verdict
    assert main(["--record", str(tmp_path / "mine.json")]) == 1


@pytest.mark.parametrize(("gpus", "name"), [("2", "verify.json"), ("0", "verify_cpu.json")])
def test_a_cpu_record_does_not_replace_that_of_gpus(asked, monkeypatch, tmp_path, gpus, name):
    monkeypatch.setattr(verb, "project_root", lambda: tmp_path)
    assert main(["--gpus", gpus]) == 0
    assert [file.name for file in (tmp_path / "experiments" / "benchmarks").iterdir()] == [name]
    assert asked["wanted"]["steps"] == 200
