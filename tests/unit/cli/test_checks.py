"""`workbench prove`, `diagnose` and `bisect`: inputs, output, and exit code."""

from __future__ import annotations

import importlib
import json

import pytest

from tests.helpers.hand_records import gradients, make_record
from tests.helpers.proofs import make_proof
from tests.helpers.vacuous_rollouts import ran
from workbench.cli import main
from workbench.cli.checks import load_function
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
    assert main(["prove", *arguments]) == code
    assert f"{name} (engine sum): {said}" in capsys.readouterr().out


@pytest.fixture
def asked(monkeypatch):
    """The arguments of `prove`, which does not run; the result is a synthetic proof."""
    given = {}

    def pretend(loss, **settings):
        given.update(settings, loss=loss)
        return make_proof(broken=False)

    monkeypatch.setattr(importlib.import_module("workbench.prove"), "prove", pretend)
    return given


def test_a_preset_and_its_settings(asked, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("policy: {temperature: 0.7}\n")
    assert main(["prove", "gspo", "--spec", str(file), "--seed", "4", "--budget-s", "3"]) == 1, "tp was not tried"
    assert asked["loss"].loss.name == "gspo"
    assert asked["loss"].policy.temperature == 0.7
    assert (asked["spec"], asked["invariants"], asked["seed"], asked["budget_s"]) == (None, None, 4, 3.0)
    assert main(["prove", "bnpo", "--invariants", "dp_split", "tp"]) == 1
    assert (asked["loss"], asked["invariants"]) == ("bnpo", ("dp_split", "tp"))
    assert main(["prove", str(file)]) == 1
    assert asked["loss"].policy.temperature == 0.7


def test_a_function_takes_its_weights_from_the_spec(asked, losses, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("loss: {denominator: document}\n")
    main(["prove", f"{losses}:right", "--spec", str(file)])
    assert asked["loss"].__name__ == "right"
    assert asked["spec"].loss.denominator == "document"
    assert asked["engine"] is None


def test_json_is_the_whole_proof(asked, capsys):
    assert main(["prove", "gspo", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["verdict"] == "breaks packing_order, as declared; keeps 1 invariant; 1 not tried"
    assert (result["ok"], result["broken"], result["declared"], result["seed"]) == (False, [], ["packing_order"], 3)
    held, order, tp = result["invariants"]
    assert (held["name"], held["cases"], held["worst"], held["counterexample"]) == ("dp_split", 12, 3e-15, None)
    assert order["counterexample"]["changed"] == "cp=2 contiguous"
    assert order["counterexample"]["source"][0]["tokens"] == [3, 5, 7]
    assert tp["worst"] == {"float": "nan"}


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("nowhere.py:f", r"no file .*nowhere\.py"),
        ("{file}:absent", "found: no absent in"),
        ("{folder}/broken.py:f", "ZeroDivisionError: division by zero"),
        ("{folder}/leaves.py:f", "SystemExit: 3"),
    ],
)
def test_a_missing_function_is_refused(losses, place, found):
    (losses.parent / "broken.py").write_text("1 / 0\n")
    (losses.parent / "leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(SpecError, match=found):
        load_function(place.format(file=losses, folder=losses.parent))


def test_a_file_without_a_function_is_no_preset(losses, capsys):
    assert main(["prove", str(losses)]) == 2
    assert f"name the function: {losses}:NAME" in capsys.readouterr().err


def test_an_unknown_preset_names_the_nearest(capsys):
    assert main(["prove", "gpso"]) == 2
    assert "did you mean 'gspo'" in capsys.readouterr().err


@pytest.fixture
def folders(tmp_path):
    return [str(make_record(scale=scale).save(tmp_path / name)) for name, scale in (("right", 1.0), ("wrong", 0.5))]


def test_the_causes_are_printed(folders, capsys):
    assert main(["diagnose", *folders]) == 1
    text = capsys.readouterr().out
    assert "made against made: from step 0 on: averaged over context-parallel ranks" in text
    assert "over_cp" in text


def test_equal_records_exit_well(folders, capsys):
    assert main(["diagnose", folders[0], folders[0]]) == 0
    assert "nothing differs beyond rounding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "verdict"), [({"scale": 0.0, "loss": 0.0}, "vacuous"), ({"loss": float("inf")}, "unsound baseline")]
)
def test_records_that_prove_nothing_do_not_exit_well(tmp_path, capsys, changes, verdict):
    folder = str(make_record(**changes).save(tmp_path / "one"))
    assert main(["diagnose", folder, folder]) == 1
    assert f"made against made: {verdict}: " in capsys.readouterr().out
    assert main(["diagnose", folder, folder, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)["result"]
    assert (read["verdict"], read["equal"]) == (verdict, False)
    assert bool(read["evidence"]["nothing"]) is (verdict == "vacuous")


def test_damaged_gradients_are_refused_with_code_2(tmp_path, capsys):
    norms = {name: float(values.norm()) for name, values in gradients().items()} | {"lm_head.weight": 1e30}
    folder = str(make_record(gradient_norms=norms).save(tmp_path / "one"))
    assert main(["diagnose", folder, folder]) == 2
    text = capsys.readouterr().err
    assert "read record made: tensors/step0000.gradients" in text
    assert "parameter lm_head.weight has norm " in text
    assert "recorded 1e+30" in text


def test_json_of_a_diagnosis(folders, capsys):
    assert main(["diagnose", *folders, "--json"]) == 1
    read = json.loads(capsys.readouterr().out)["result"]
    assert read["equal"] is False
    assert read["verdict"] == "different"
    assert read["evidence"]["trained_tokens"] == 11
    assert read["evidence"]["gradient_tokens"] is None
    assert read["causes"][0]["name"] == "over_cp"
    assert read["causes"][0]["needs"] == ["cp"]
    assert read["next_experiment"] is None


def test_a_folder_without_a_record_is_refused(folders, tmp_path, capsys):
    assert main(["diagnose", folders[0], str(tmp_path)]) == 2
    assert "neither record.json nor config.json" in capsys.readouterr().err


ABLATION = """
reference: one
base: {model: {source: tiny-qwen3}, data: {documents_per_step: 4}}
configurations:
  one: {}
  again: {}
  cooler: {policy: {temperature: 0.9}}
"""


@pytest.fixture
def planned(tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text(f"truth: one\n{ABLATION.replace('base: {', 'base: {precision: float64, ')}")
    return lambda name: f"{file}:{name}"


def test_runs_of_an_ablation_that_part(planned, capsys):
    assert main(["bisect", planned("one"), planned("cooler"), "--block-tokens", "16"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("one and cooler: step 0, forward: the log-probabilities, row 0, tokens 0 to 15 (block 0);")


def test_json_of_runs_that_do_not(planned, capsys):
    assert main(["bisect", planned("one"), planned("again"), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)["result"]
    assert (read["equal"], read["divergence"], read["a"], read["b"]) == (True, None, "one", "again")
    assert read["verdict"] == "equal"
    assert read["evidence"]["documents"] == 4


def test_runs_that_train_nothing_do_not_exit_well(tmp_path, capsys):
    one = ran(tmp_path, "advantages of zero", "one")
    assert main(["bisect", str(one.path), str(one.path)]) == 1
    assert "vacuous, no document has a gradient: the same bits in 1 step" in capsys.readouterr().out


def test_a_missing_run_is_refused(planned, capsys):
    assert main(["bisect", planned("one"), planned("two")]) == 2
    assert "one of one, again, cooler" in capsys.readouterr().err
    assert main(["bisect", planned("").removesuffix(":"), planned("two")]) == 2
    text = capsys.readouterr().err
    assert "an ablation of 3 runs" in text
    assert "some.yaml:one" in text
    assert main(["bisect", "nowhere", "nowhere"]) == 2
    assert "no run or experiment of that name" in capsys.readouterr().err
