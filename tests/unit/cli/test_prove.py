"""`workbench prove`: what it takes, what it prints, and its exit code."""

from __future__ import annotations

import json

import pytest

from tests.helpers.proofs import make_proof
from workbench.cli import main
from workbench.cli import prove as verb
from workbench.errors import SpecError

LOSSES = """
from clip_of_a_test import clip


def right(batch, outputs, totals):
    ratio_T = clip(outputs.policy_logprobs_T - batch.old_logprobs_T).exp()
    return -(ratio_T * batch.advantages_T * batch.loss_mask_T).sum() / totals.tokens


def wrong(batch, outputs, totals):
    return right(batch, outputs, totals) * totals.cp
"""


@pytest.fixture
def losses(tmp_path):
    (tmp_path / "clip_of_a_test.py").write_text("def clip(x):\n    return x.clamp(-1, 1)\n")
    file = tmp_path / "our_losses_of_a_test.py"
    file.write_text(LOSSES)
    return file


@pytest.mark.parametrize(
    ("name", "code", "said"), [("right", 0, "keeps all 1 invariant"), ("wrong", 1, "breaks cp_degree")]
)
def test_a_trainers_function_from_a_file(losses, capsys, name, code, said):
    arguments = [
        f"{losses}:{name}",
        "--engine",
        "sum",
        "--invariants",
        "cp_degree",
        "--rounds",
        "1",
        "--budget-s",
        "60",
    ]
    assert verb.main(arguments) == code
    assert f"{name} (engine sum): {said}" in capsys.readouterr().out


@pytest.fixture
def asked(monkeypatch):
    """What `prove` was asked, without being done; the answer is a made-up proof."""
    import workbench.prove as package

    given = {}

    def pretend(loss, **settings):
        given.update(settings, loss=loss)
        return make_proof(broken=False)

    monkeypatch.setattr(package, "prove", pretend)
    return given


def test_a_preset_and_its_settings(asked, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("policy: {temperature: 0.7}\n")
    assert verb.main(["gspo", "--spec", str(file), "--seed", "4", "--budget-s", "3"]) == 1, "tp was not tried"
    assert asked["loss"].loss.name == "gspo"
    assert asked["loss"].policy.temperature == 0.7
    assert (asked["spec"], asked["invariants"], asked["seed"], asked["budget_s"]) == (None, None, 4, 3.0)
    assert verb.main(["bnpo", "--invariants", "dp_split", "tp"]) == 1
    assert (asked["loss"], asked["invariants"]) == ("bnpo", ("dp_split", "tp"))
    assert verb.main([str(file)]) == 1
    assert asked["loss"].policy.temperature == 0.7


def test_a_function_takes_its_weights_from_the_spec(asked, losses, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("loss: {denominator: document}\n")
    verb.main([f"{losses}:right", "--spec", str(file)])
    assert asked["loss"].__name__ == "right"
    assert asked["spec"].loss.denominator == "document"
    assert asked["engine"] is None


def test_json_is_the_whole_proof(asked, capsys):
    assert verb.main(["gspo", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "breaks packing_order, as declared; keeps 1 invariant; 1 not tried"
    assert (found["ok"], found["broken"], found["declared"], found["seed"]) == (False, [], ["packing_order"], 3)
    held, order, tp = found["invariants"]
    assert (held["name"], held["cases"], held["worst"], held["counterexample"]) == ("dp_split", 12, 3e-15, None)
    assert order["counterexample"]["changed"] == "cp=2 contiguous"
    assert order["counterexample"]["source"][0]["tokens"] == [3, 5, 7]
    assert tp["worst"] == {"float": "nan"}


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("nowhere.py:f", "no file nowhere"),
        ("{file}:absent", "has no function 'absent'"),
        ("{folder}/broken.py:f", "ZeroDivisionError: division by zero"),
        ("{folder}/leaves.py:f", "SystemExit: 3"),
    ],
)
def test_a_function_that_is_not_there_is_said_in_words(losses, place, found):
    (losses.parent / "broken.py").write_text("1 / 0\n")
    (losses.parent / "leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(SpecError, match=found):
        verb.load_function(place.format(file=losses, folder=losses.parent))


def test_a_file_without_a_function_is_no_preset(losses, capsys):
    assert main(["prove", str(losses)]) == 2
    assert f"name the function: {losses}:NAME" in capsys.readouterr().err


def test_an_unknown_preset_names_the_nearest(capsys):
    assert main(["prove", "gpso"]) == 2
    assert "did you mean 'gspo'" in capsys.readouterr().err
