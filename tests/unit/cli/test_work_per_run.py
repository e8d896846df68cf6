"""Looking at runs opens and parses a bounded number of files for each: counts, which no load of the machine moves."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.hand_made import make_project, make_run
from workbench.cli import main
from workbench.records.directory import RunDirectory
from workbench.records.lookup import experiments

SMALL, LARGE = 3, 6
_seen: list[Path] = []
_watching: list[bool] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    """Audit hook: it cannot be removed, so it notes only while a test watches."""
    if _watching and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | Path):
        _seen.append(Path(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def hooked():
    sys.addaudithook(_note)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {number: make_project(tmp_path_factory.mktemp(f"runs{number}")) for number in (SMALL, LARGE)}
    for number, folder in folders.items():
        for index in range(number):
            make_run(folder / "experiments" / "many", f"c{index}", at_s=index, seed=index)
    return folders


def work(folder, monkeypatch, *arguments):
    """Counts of what a verb opens, by the file's name, and of the settings that it validates."""
    monkeypatch.chdir(folder)
    parsed, read_spec = [], RunDirectory.read_spec
    monkeypatch.setattr(RunDirectory, "read_spec", staticmethod(lambda path: (parsed.append(path), read_spec(path))[1]))
    assert main([*arguments]) == 0  # imports and caches
    parsed.clear()
    _seen.clear()
    _watching.append(True)
    try:
        assert main([*arguments]) == 0
    finally:
        _watching.clear()
    inside = [path for path in _seen if "many" in path.parts]
    return Counter(path.name for path in inside if path.is_file()), len(inside), len(parsed)


@pytest.mark.parametrize(
    "verb", [("ls",), ("status", "many"), ("ls", "--json"), ("status", "many", "--json")], ids=" ".join
)
def test_each_run_is_read_once_whatever_their_number(folders, monkeypatch, verb):
    of_small, opened_small, _ = work(folders[SMALL], monkeypatch, *verb)
    of_large, opened_large, parsed = work(folders[LARGE], monkeypatch, *verb)
    each = (opened_large - opened_small) / (LARGE - SMALL)
    full = verb == ("status", "many", "--json")  # ranks, steps and exits of each, and their baseline, too
    assert each <= (11 if full else 4)
    assert parsed == of_large["config.json"] == LARGE + full
    assert of_large["state.json"] <= (5 if full else 1) * LARGE
    assert of_large["metrics.jsonl"] == LARGE
    assert of_small["metrics.jsonl"] == SMALL


def test_one_run_is_found_without_the_settings_of_the_others(folders, monkeypatch):
    of_small, _, parsed_small = work(folders[SMALL], monkeypatch, "status", "c1")
    of_large, _, parsed_large = work(folders[LARGE], monkeypatch, "status", "c1")
    assert parsed_small == parsed_large == 2, "its own, and its baseline's"
    assert of_small["metrics.jsonl"] == of_large["metrics.jsonl"] == 1
    extra = of_large["state.json"] - of_small["state.json"]
    assert extra <= 2 * (LARGE - SMALL), "its name is looked for, and its baseline"


def test_the_experiments_are_found_without_a_look_at_each_run(folders, monkeypatch):
    counts = []
    for number in (SMALL, LARGE):
        monkeypatch.chdir(folders[number])
        calls: Counter[object] = Counter()
        sys.setprofile(lambda frame, event, _, calls=calls: calls.update([frame.f_code] if event == "call" else []))
        try:
            found = experiments()
        finally:
            sys.setprofile(None)
        assert [folder.name for folder in found] == ["many"]
        counts.append(calls[Path.resolve.__code__])
    assert counts[0] == counts[1] > 0
