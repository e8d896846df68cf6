"""`workbench bisect`: what it takes, what it prints, and its exit code."""

import json

import pytest

from tests.helpers.vacuous_rollouts import ran
from workbench.cli import bisect as verb
from workbench.cli import main

ABLATION = """
reference: one
base: {model: {source: tiny-qwen3}, data: {documents_per_step: 4}}
configurations:
  one: {}
  again: {}
  cooler: {policy: {temperature: 0.9}}
"""


@pytest.fixture
def asked(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text(f"truth: one\n{ABLATION.replace('base: {', 'base: {precision: float64, ')}")
    return lambda name: f"{file}:{name}"


def test_runs_of_an_ablation_that_part(asked, capsys):
    assert verb.main([asked("one"), asked("cooler"), "--block-tokens", "16"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("one and cooler: step 0, forward: the log-probabilities, row 0, tokens 0 to 15 (block 0);")


def test_json_of_runs_that_do_not(asked, capsys):
    assert verb.main([asked("one"), asked("again"), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert (read["equal"], read["parting"], read["a"], read["b"]) == (True, None, "one", "again")
    assert read["verdict"] == "equal"
    assert read["evidence"]["documents"] == 4


def test_runs_that_train_nothing_do_not_exit_well(tmp_path, capsys):
    one = ran(tmp_path, "advantages of zero", "one")
    assert verb.main([str(one.path), str(one.path)]) == 1
    assert "vacuous, no document has a gradient: the same bits in 1 step" in capsys.readouterr().out


def test_what_is_not_there_is_said_in_words(asked, capsys):
    assert main(["bisect", asked("one"), asked("two")]) == 2
    assert "one of one, again, cooler" in capsys.readouterr().err
    assert main(["bisect", asked("").removesuffix(":"), asked("two")]) == 2
    said = capsys.readouterr().err
    assert "an ablation of 3 runs" in said
    assert "some.yaml:one" in said
    assert main(["bisect", "nowhere", "nowhere"]) == 2
    assert "no run or experiment of that name" in capsys.readouterr().err
