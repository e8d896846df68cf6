"""Trainers of transformers and TRL and a loop of Accelerate, recorded by the lines that a user adds."""

import pytest
import torch
from safetensors.torch import load_file

import workbench as wb
from tests.engines.engine import run
from workbench.records import trainer_files as files

pytestmark = pytest.mark.engines
KINDS = ("hf", "sft", "dpo", "grpo", "accelerate")


def recorded(kind, folder, **changes):
    output = run("trl", kind, folder, *(f"{name}={value}" for name, value in changes.items()))
    return folder, output.rsplit("weights ", 1)[1].strip()


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorder_changes_no_bit_of_the_weights(kind, tmp_path):
    _, weights = recorded(kind, tmp_path / "mine")
    _, plain = recorded(kind, tmp_path / "none", plain=1)
    assert weights == plain
    steps = files.read_steps(tmp_path / "mine")
    assert len(steps) == 3
    assert all(step["loss"] is not None and step["observed"]["clip"] == {"max_norm": 0.5} for step in steps)


@pytest.mark.parametrize(
    ("kind", "planted", "cause"),
    [
        ("hf", {"accumulation": 1}, "times_micro_batches"),
        ("sft", {"prompts": 1}, "other_mask"),
        ("dpo", {"beta": 0.3}, "other_settings"),
        ("grpo", {"scale": "none"}, "advantages"),
        ("accelerate", {"twice": 1}, "over_micro_batches"),
    ],
)
def test_a_planted_factor_is_named_first(kind, planted, cause, tmp_path):
    right, _ = recorded(kind, tmp_path / "right")
    wrong, _ = recorded(kind, tmp_path / "wrong", **planted)
    diagnosis = wb.diagnose(right, wrong)
    assert diagnosis.causes[0].name == cause, str(diagnosis)


@pytest.mark.parametrize("kind", ["hf", "sft", "dpo"])
def test_another_division_into_micro_batches_is_no_difference(kind, tmp_path):
    right, _ = recorded(kind, tmp_path / "right")
    other, _ = recorded(kind, tmp_path / "other", each=4)
    diagnosis = wb.diagnose(right, other)
    assert diagnosis.equal, str(diagnosis)
    assert wb.Record.load(right).context["micro_batches"] != wb.Record.load(other).context["micro_batches"]


def test_recorded_gradients_are_those_by_hand(tmp_path):
    folder, _ = recorded("hf", tmp_path / "mine", by_hand=1)
    right, seen = load_file(f"{folder}.safetensors"), files.read_tensors(folder, 0, "gradients")
    assert seen.keys() == right.keys()
    for name, gradient in right.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_the_values_of_tokens_that_grpo_computes_are_noted(tmp_path):
    folder, _ = recorded("grpo", tmp_path / "mine")
    tokens = files.read_tensors(folder, 0, "tokens")
    here = tokens["documents"] >= 0
    assert tokens["documents"][here].unique().tolist() == list(range(8))
    assert {"policy_logprobs", "old_logprobs", "advantages", "trained", "targets", "positions"} <= tokens.keys()
    assert bool((tokens["policy_logprobs"][tokens["trained"]] < 0).all())
    advantages = torch.stack([tokens["advantages"][tokens["documents"] == one].unique() for one in range(8)])
    assert abs(float(advantages.view(2, 4).sum())) < 1e-4, "advantages of a prompt sum to 0"
