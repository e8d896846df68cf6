"""`workbench bench` writes one record for each benchmark, and its exit code says whether every bar holds."""

from __future__ import annotations

import json
import sys

import pytest

from experiments.benchmarks import launch_overhead
from workbench.cli import bench
from workbench.cli.bench import main
from workbench.errors import SpecError


@pytest.fixture
def record(monkeypatch):
    """What the benchmark will have measured."""
    record = {"bars": {"ready": {"bar": 1.0, "median": 0.5, "holds": True}}}

    def measure(**wanted):
        wanted.pop("report_progress")("half way")
        return record | {"wanted": wanted}

    monkeypatch.setattr(launch_overhead, "measure", measure)
    monkeypatch.setattr(launch_overhead, "format_record", lambda record: "in words")
    return record


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_it_writes_the_record_and_says_whether_bars_hold(record, tmp_path, capsys, holds, code):
    record["bars"]["ready"]["holds"] = holds
    assert main(["launch_overhead", "--folder", str(tmp_path / "new" / "folder"), "--pairs", "3"]) == code
    written = json.loads((tmp_path / "new" / "folder" / "launch_overhead.json").read_text())
    assert written["wanted"] == {"pairs": 3}
    assert written["command"].startswith("workbench bench launch_overhead")
    assert str(tmp_path) not in written["command"]
    said = capsys.readouterr().out
    assert "half way" in said
    assert "in words" in said


def test_all_are_run_if_none_is_named(record, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "BENCHMARKS", {"launch_overhead": "?", "another": "?"})
    monkeypatch.setitem(sys.modules, "workbench.bench.another", launch_overhead)
    assert main(["--folder", str(tmp_path)]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["another.json", "launch_overhead.json"]


def test_a_stranger_is_refused(tmp_path):
    with pytest.raises(SpecError, match="benchmark speed"):
        main(["speed", "--folder", str(tmp_path)])
