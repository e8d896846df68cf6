"""`workbench check`: text, JSON and exit codes."""

import json
from pathlib import Path

from workbench.cli import main

DUMPS = Path(__file__).parents[2] / "dumps/verl"
RIGHT = """
settings: {loss_agg_mode: token-mean, rollout_correction: {rollout_is: token, rollout_is_threshold: 1.1}}
advantages: {estimator: grpo}
"""


def run(tmp_path, text, *arguments, dump=DUMPS / "token_mean.pkl"):
    settings = tmp_path / "settings.yaml"
    settings.write_text(text)
    return main(["check", str(dump), "--system", "verl", "--settings", str(settings), *arguments])


def test_a_right_step_gives_0(tmp_path, capsys):
    assert run(tmp_path, RIGHT) == 0
    assert capsys.readouterr().out.startswith("agrees: ")


def test_a_wrong_one_gives_1_and_json(tmp_path, capsys):
    text = RIGHT.replace("token-mean", "seq-mean-token-mean")
    assert run(tmp_path, text, "--json", "--page", str(tmp_path / "step.html")) == 1
    assert "first in the stage coefficients" in (tmp_path / "step.html").read_text()
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "workbench.check/1"
    assert answer["result"]["first"] == "coefficients"
    assert answer["result"]["causes"][0]["kind"] == "denominator"


def test_mistakes_give_2_without_a_traceback(tmp_path, capsys):
    assert run(tmp_path, "loss_agg_mode: token-mean") == 2
    assert "put the options of the loss under settings:" in capsys.readouterr().err
    damaged = tmp_path / "damaged.pkl"
    damaged.write_bytes((DUMPS / "token_mean.pkl").read_bytes()[:-900])
    assert run(tmp_path, RIGHT, dump=damaged) == 2
    assert run(tmp_path, RIGHT, dump=tmp_path / "nowhere.pkl") == 2
    assert run(tmp_path, RIGHT.replace("grpo", "gropo")) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("do: ") == 3


def test_against_another_dump(tmp_path, capsys):
    other = tmp_path / "other.yaml"
    other.write_text(RIGHT.replace("token-mean", "seq-mean-token-mean"))
    pair = ["--against", str(DUMPS / "token_mean.pkl"), "--against-system", "verl", "--against-settings"]
    assert run(tmp_path, RIGHT, *pair, str(tmp_path / "settings.yaml")) == 0
    assert "agree: " in capsys.readouterr().out
    assert run(tmp_path, RIGHT, *pair, str(other), "--json") == 1
    answer = json.loads(capsys.readouterr().out)["result"]
    assert answer["verdict"] == "agrees"
    assert answer["against"]["settings"][0]["name"] == "denominator"
    assert run(tmp_path, RIGHT, "--against-system", "verl") == 2
    assert "name it: --against" in capsys.readouterr().err


TRL = DUMPS.parent / "trl"


def with_model(tmp_path, *arguments, dump=TRL / "with_gradients.pt"):
    settings = tmp_path / "settings.yaml"
    settings.write_text("settings: {loss_type: grpo}")
    return main(["check", str(dump), "--system", "trl", "--settings", str(settings), *arguments])


def test_with_a_model_in_a_layout(tmp_path, capsys):
    given = ["--model", str(TRL / "policy"), "--layout", '{"cp": 2}', "--json", "--page", str(tmp_path / "step.html")]
    assert with_model(tmp_path, *given) == 0
    answer = json.loads(capsys.readouterr().out)["result"]
    assert [answer["stages"][0]["name"], answer["stages"][-1]["name"]] == ["log-probabilities", "gradient"]
    assert answer["of_model"]["gradient_norm"] > 0.1
    assert answer["of_model"]["layout"].startswith("cp=2")
    assert "log-probabilities" in (tmp_path / "step.html").read_text()


def test_mistakes_of_a_model_give_2_without_a_traceback(tmp_path, capsys):
    model = ["--model", str(TRL / "policy")]
    assert with_model(tmp_path, "--layout", '{"cp": 2}') == 2
    assert with_model(tmp_path, *model, "--layout", "cp=2") == 2
    assert with_model(tmp_path, *model, "--layout", '{"cpu": 2}') == 2
    assert with_model(tmp_path, *model, "--layout", '{"tp": 4}') == 2
    assert with_model(tmp_path, "--model", str(tmp_path / "nowhere")) == 2
    assert with_model(tmp_path, "--model", "tiny-qwen3") == 2  # a vocabulary of 19
    assert with_model(tmp_path, "--vocabulary", str(tmp_path / "nowhere.json")) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert error.count("do: ") == 7
    assert "ids of the checkpoint's own vocabulary, 0 to 18" in error
