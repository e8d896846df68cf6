import json
import os
from dataclasses import replace

import pytest

from tests.helpers.comparisons import layout_parity
from tests.helpers.stand_in import stand_in
from workbench import atomic as whole_files
from workbench.compare.comparison import Comparison
from workbench.errors import RecordError, VerdictError


def test_saved_and_read_back_is_the_same(tmp_path):
    comparison = layout_parity()
    comparison.save(tmp_path / "comparison.json")
    assert Comparison.load(tmp_path / "comparison.json") == comparison
    assert list(tmp_path.iterdir()) == [tmp_path / "comparison.json"]


def test_numbers_that_json_has_no_word_for_come_back(tmp_path):
    comparison, path = layout_parity(), tmp_path / "comparison.json"
    comparison.configurations[0].steps[0]["loss/total/sum"] = float("nan")
    comparison.configurations[0] = replace(comparison.configurations[0], factor=float("-inf"))
    comparison.save(path)
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not standard JSON"))
    first = Comparison.load(path).configurations[0]
    assert (repr(first.steps[0]["loss/total/sum"]), first.factor) == ("nan", float("-inf"))


def test_what_was_saved_stays_until_the_new_is_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "comparison.json"
    layout_parity().save(path)
    before = path.read_bytes()

    def crash(*_):
        raise OSError("disk full")

    monkeypatch.setattr(whole_files, "os", stand_in(os, fsync=crash))
    with pytest.raises(OSError, match="disk full"):
        replace(layout_parity(), question="another").save(path)
    assert path.read_bytes() == before


def test_a_damaged_file_is_refused_by_name(tmp_path):
    layout_parity().save(tmp_path / "comparison.json")
    text = (tmp_path / "comparison.json").read_text()
    (tmp_path / "comparison.json").write_text(text[: len(text) // 2])
    with pytest.raises(RecordError, match=r"comparison\.json"):
        Comparison.load(tmp_path / "comparison.json")


def test_tables_have_a_row_for_everything():
    comparison = layout_parity()
    assert list(comparison.table().index) == [c.name for c in comparison.configurations]
    assert len(comparison.parameters()) == sum(len(c.parameters) for c in comparison.configurations)
    assert len(comparison.steps()) == sum(len(c.steps) for c in comparison.configurations)


def test_the_table_tells_the_worst_step():
    steps = [
        {"step": step, "distance": distance, "budget": 2.0, "relative_l2": distance / 10}
        for step, distance in enumerate((1.0, 3.0, 0.5))
    ]
    comparison = layout_parity()
    judged = replace(comparison.configurations[1], whole_gradient=steps)
    row = replace(comparison, configurations=[judged]).table().loc[judged.name]
    assert (row["of_budget"], row["relative_l2"]) == (1.5, 0.3)


def test_only_settings_that_differ_are_shown():
    differing = layout_parity().settings_that_differ()
    assert "precision" in differing.columns
    assert all(differing[column].map(repr).nunique() > 1 for column in differing.columns)


def test_an_unknown_configuration_is_refused_with_the_known_ones():
    comparison = layout_parity()
    with pytest.raises(RecordError, match=comparison.configurations[0].name):
        comparison["nobody"]


def test_check_passes_what_agrees_and_names_what_does_not():
    comparison = layout_parity()
    failed = [c.name for c in comparison.configurations if c.verdict == "failed"]
    fault = next(c for c in comparison.configurations if c.settings["faults"] and c.verdict == "different")
    right = next(c for c in comparison.configurations if c.verdict == "equal")
    comparison.check(right.name)
    with pytest.raises(VerdictError, match=f"{fault.name} is different"):
        comparison.check(right.name, fault.name)
    with pytest.raises(VerdictError, match=f"{failed[0]} is failed"):
        comparison.check()
