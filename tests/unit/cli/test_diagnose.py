"""`workbench diagnose`: what it takes, what it prints, and its exit code."""

import json

import pytest

from tests.helpers.hand_records import make_record
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


def test_json(folders, capsys):
    assert verb.main([*folders, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)
    assert read["equal"] is False
    assert read["causes"][0]["name"] == "over_cp"
    assert read["causes"][0]["needs"] == ["cp"]
    assert read["next_experiment"] is None


def test_a_folder_without_a_record_is_refused_in_words(folders, tmp_path, capsys):
    assert main(["diagnose", folders[0], str(tmp_path)]) == 2
    assert "neither record.json nor config.json" in capsys.readouterr().err
