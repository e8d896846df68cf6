"""`workbench diagnose`: what it takes, what it prints, and its exit code."""

import json

import pytest

from tests.helpers.hand_records import gradients, make_record
from workbench.cli import diagnose as verb
from workbench.cli import main


@pytest.fixture
def folders(tmp_path):
    return [str(make_record(scale=scale).save(tmp_path / name)) for name, scale in (("right", 1.0), ("wrong", 0.5))]


def test_the_causes_are_printed(folders, capsys):
    assert verb.main(folders) == 1
    said = capsys.readouterr().out
    assert "made against made: from step 0 on: averaged over context-parallel ranks" in said
    assert "over_cp" in said


def test_equal_records_exit_well(folders, capsys):
    assert verb.main([folders[0], folders[0]]) == 0
    assert "nothing differs beyond rounding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "verdict"), [({"scale": 0.0, "loss": 0.0}, "vacuous"), ({"loss": float("inf")}, "unsound baseline")]
)
def test_records_that_prove_nothing_do_not_exit_well(tmp_path, capsys, changes, verdict):
    folder = str(make_record(**changes).save(tmp_path / "one"))
    assert verb.main([folder, folder]) == 1
    assert f"made against made: {verdict}: " in capsys.readouterr().out
    assert verb.main([folder, folder, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert (read["verdict"], read["equal"]) == (verdict, False)
    assert bool(read["evidence"]["nothing"]) is (verdict == "vacuous")


def test_damaged_gradients_are_refused_with_code_2(tmp_path, capsys):
    norms = {name: float(values.norm()) for name, values in gradients().items()} | {"lm_head.weight": 1e30}
    folder = str(make_record(gradient_norms=norms).save(tmp_path / "one"))
    assert main(["diagnose", folder, folder]) == 2
    said = capsys.readouterr().err
    assert "read record made: tensors/step0000.gradients" in said
    assert "parameter lm_head.weight has norm " in said
    assert "recorded 1e+30" in said


def test_json(folders, capsys):
    assert verb.main([*folders, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["equal"] is False
    assert read["verdict"] == "different"
    assert read["evidence"]["trained_tokens"] == 11
    assert read["evidence"]["gradient_tokens"] is None
    assert read["causes"][0]["name"] == "over_cp"
    assert read["causes"][0]["needs"] == ["cp"]
    assert read["next_experiment"] is None


def test_a_folder_without_a_record_is_refused_in_words(folders, tmp_path, capsys):
    assert main(["diagnose", folders[0], str(tmp_path)]) == 2
    assert "neither record.json nor config.json" in capsys.readouterr().err
