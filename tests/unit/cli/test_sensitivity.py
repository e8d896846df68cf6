"""`workbench sensitivity`: text, JSON, exit codes, and the saved record."""

import json

import pytest

from workbench.cli import main
from workbench.sensitivity.record import Sensitivity

ABLATION = """
question: does it
base: {precision: float64, steps: 1, data: {documents_per_step: 4}}
reference: one
configurations:
  one: {}
  cp2: {layout: {cp: 2}}
extra:
  wrong: {layout: {cp: 2}, faults: [missing_cp_factor]}
"""
SEEN, BLIND = "missing_cp_factor", "tool_mask_ignored"


@pytest.fixture
def ablation(tmp_path):
    path = tmp_path / "mine/ablation.yaml"
    path.parent.mkdir()
    path.write_text(ABLATION)
    return str(path)


def test_the_text_has_the_score_and_the_record_is_saved(ablation, tmp_path, capsys):
    saved = tmp_path / "score.json"
    assert main(["sensitivity", ablation, "--faults", SEEN, BLIND, "--save", str(saved)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("mine: the comparison rejects 1 of 2 admissible faults (50.0 %)")
    assert "a hole in a mask" in shown.out
    assert "missing_cp_factor in cp2: different" in shown.err
    record = Sensitivity.load(saved)
    assert (record.score, dict(record.configurations)) == (0.5, {"one": "reference", "cp2": "equal"})
    assert str(tmp_path) not in record.command


@pytest.mark.parametrize(("least", "code"), [("0.5", 0), ("0.6", 1)])
def test_json_and_the_lowest_score(ablation, capsys, least, code):
    arguments = ["--faults", SEEN, BLIND, "--no-remedies", "--least", least, "--json"]
    assert main(["sensitivity", ablation, *arguments]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "workbench.sensitivity/1"
    assert answer["result"]["score"] == 0.5
    assert answer["result"]["disagreements"] == []


def test_a_configuration_can_be_chosen(ablation, capsys):
    assert main(["sensitivity", ablation, "--faults", SEEN, "--configurations", "one", "--no-remedies", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["result"]["results"]
    assert (result["configuration"], result["killed"], result["missing"]) == ("one", False, ["one cp rank"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--least", "1.5"], "between 0 and 1"),
        (["--faults", "missing_cp"], "did you mean"),
        (["--configurations", "cp3"], "cp3"),
    ],
)
def test_mistakes_give_2_without_a_traceback(ablation, capsys, arguments, text):
    assert main(["sensitivity", ablation, *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "Traceback" not in error


def test_a_missing_file_is_an_error(tmp_path, capsys):
    assert main(["sensitivity", str(tmp_path / "nowhere.yaml")]) == 2
    assert "Traceback" not in capsys.readouterr().err
