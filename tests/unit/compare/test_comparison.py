"""A comparison saved and read, its table and lines, and what a loss declares of itself."""

import json
import os
from dataclasses import replace

import pytest

from tests.helpers.comparisons import layout_parity
from tests.helpers.stand_in import stand_in
from workbench import atomic as whole_files
from workbench.compare.comparison import BROKEN_UNDER, Comparison, declared_note
from workbench.errors import RecordError, VerdictError
from workbench.prove.invariants import DECLARED
from workbench.specs.losses import PRESETS, LossSpec


def test_saved_and_read_back_is_the_same(tmp_path):
    comparison = layout_parity()
    comparison.save(tmp_path / "comparison.json")
    assert Comparison.load(tmp_path / "comparison.json") == comparison
    assert list(tmp_path.iterdir()) == [tmp_path / "comparison.json"]


def test_numbers_outside_of_json_round_trip(tmp_path):
    comparison, path = layout_parity(), tmp_path / "comparison.json"
    comparison.configurations[0].steps[0]["loss/total/sum"] = float("nan")
    comparison.configurations[0] = replace(comparison.configurations[0], factor=float("-inf"))
    comparison.save(path)
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not standard JSON"))
    first = Comparison.load(path).configurations[0]
    assert (repr(first.steps[0]["loss/total/sum"]), first.factor) == ("nan", float("-inf"))


def test_the_old_file_stays_until_the_new_one_is_on_disk(tmp_path, monkeypatch):
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


def test_the_table_has_the_worst_step():
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


def test_an_unknown_configuration_is_refused_with_the_valid_names():
    comparison = layout_parity()
    with pytest.raises(RecordError, match=comparison.configurations[0].name):
        comparison["nobody"]


def test_check_passes_agreement_and_names_disagreement():
    comparison = layout_parity()
    failed = [c.name for c in comparison.configurations if c.verdict == "failed"]
    fault = next(c for c in comparison.configurations if c.settings["faults"] and c.verdict == "different")
    right = next(c for c in comparison.configurations if c.verdict == "equal")
    comparison.check(right.name)
    with pytest.raises(VerdictError, match=f"{fault.name} is different"):
        comparison.check(right.name, fault.name)
    with pytest.raises(VerdictError, match=f"{failed[0]} is failed"):
        comparison.check()


# ---- what a loss declares of itself ----


def note_of(loss):
    return declared_note({"loss": loss})


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_run_declares_what_its_loss_declares(name):
    note, breaks = note_of(LossSpec(name=name).model_dump(mode="json")), LossSpec(name=name).breaks
    assert [key for key, meaning in BROKEN_UNDER.items() if meaning in note] == [b for b in BROKEN_UNDER if b in breaks]
    assert bool(note) == bool(breaks)


def test_losses_that_break_an_invariant_by_definition_are_declared():
    assert all(BROKEN_UNDER[key] in note_of({"name": "bnpo"}) for key in ("micro_batch", "dp"))
    for name in ("clip_cov", "kl_cov"):
        note = note_of({"name": name})
        assert all(BROKEN_UNDER[key] in note for key in ("micro_batch", "packing", "dp", "cp"))
        assert note.startswith(f"{name} declares")


@pytest.mark.parametrize(
    "settings",
    [{}, {"loss": None}, {"loss": {"name": "no such loss"}}, {"loss": "own.py:mine"}, {"loss": {"no_such_key": 1}}],
)
def test_a_loss_that_cannot_be_read_declares_nothing(settings):
    assert declared_note(settings) == ""


def test_every_declaration_has_a_meaning():
    assert set(BROKEN_UNDER) == set(DECLARED)
