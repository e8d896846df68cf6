"""Dumps that TRL 1.16.0 wrote agree with their settings, and other settings are named (`tests/dumps/trl/write.py`)."""

from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.errors import RecordError, SpecError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.trl.dump import read_dump

DUMPS = Path(__file__).parents[3] / "dumps/trl"


def check(loss_type, **settings):
    return check_step(DUMPS / f"{loss_type}.pt", system="trl", settings={"loss_type": loss_type, **settings})


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_what_trl_wrote_agrees(loss_type):
    result = check(loss_type)
    assert result.ok, str(result)
    agreeing = [stage for stage in result.stages if stage.status == "agrees"]
    assert [stage.name for stage in agreeing] == ["coefficients", "loss", "metrics"]
    assert len(agreeing[-1].compared) >= 4
    assert result.unknown_metrics == ("step_time",)


@pytest.mark.parametrize(
    ("written", "settings", "text"),
    [
        ("dapo", {"loss_type": "grpo"}, "divided by all trained tokens of the step"),
        ("grpo", {"loss_type": "dapo"}, "divided by documents, each over its own tokens"),
        ("dapo", {"epsilon_high": 0.28}, "the clip is 0.2 on both sides"),
        ("dapo", {"importance_sampling_level": "sequence"}, "the surrogate is ppo"),
    ],
)
def test_other_settings_than_trl_had_are_named(written, settings, text):
    result = check_step(DUMPS / f"{written}.pt", system="trl", settings={"loss_type": written, **settings})
    assert result.first.name == "coefficients"
    assert text in result.causes[0].description, str(result)


def test_logged_completions_have_advantages():
    path, groups = DUMPS / "completions.parquet", {"num_generations": 4}
    result = check_step(path, system="trl", settings={}, advantages=groups)
    assert result.ok, str(result)
    assert [stage.name for stage in result.stages if stage.status == "agrees"] == ["advantages"]
    assert "the reward is the sum of share_of_even" in "\n".join(result.undecided)
    other = check_step(path, system="trl", settings={}, advantages={**groups, "scale_rewards": "batch"})
    assert other.causes[0].description == "advantages are divided by the deviation of the group"


def test_values_have_their_names(tmp_path):
    content = read_restricted(DUMPS / "dapo.pt")
    tools = torch.ones(8, 8)
    tools[:, 3] = 0
    content |= {"tool_mask": tools, "importance_sampling_ratio": torch.full((8, 1), 0.5)}
    torch.save(content, tmp_path / "step.pt")
    dump = read_dump(tmp_path / "step.pt")
    assert (dump.tokens["token_mask"].sum() - dump.loss_mask_T.sum()) == 7  # one completion has two tokens
    assert dump.tokens["correction_weights"].unique().tolist() == [0.5]
    assert dump.documents["advantages"].shape == (8,)


@pytest.mark.parametrize(("content", "message"), [([1], "found: list"), ({"a": torch.ones(2)}, "found: a")])
def test_what_is_no_batch_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "step.pt")
    with pytest.raises(RecordError, match=message):
        read_dump(tmp_path / "step.pt")


def test_a_damaged_table_is_refused(tmp_path):
    whole = (DUMPS / "completions.parquet").read_bytes()
    for content in (b"", whole[:-50], whole[100:]):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(RecordError, match="a parquet table"):
            read_dump(tmp_path / "a.parquet")


def test_rewards_that_are_normalised_one_by_one_are_refused():
    options = {"multi_objective_aggregation": "normalize_then_sum"}
    with pytest.raises(SpecError, match="normalises each reward"):
        check_step(DUMPS / "completions.parquet", system="trl", settings={}, advantages=options)


def test_prompts_and_gradients_of_a_hook_are_read(tmp_path):
    step = check_step(DUMPS / "with_gradients.pt", system="trl", settings={"loss_type": "grpo"}).numbers.reading.dump
    assert sorted({len(one) for one in step.ids["prompt_ids"]}) == [3, 4]  # words of the prompts
    assert len(step.gradients) == 27
    ones = torch.ones(1, 2)
    torch.save({"completion_mask": ones, "metrics": {"grad_norm": 0.5, "kl": 0.1}}, tmp_path / "norm.pt")
    dump = read_dump(tmp_path / "norm.pt")
    assert (dump.gradient_norm, dump.metrics) == (0.5, {"kl": 0.1})
    torch.save({"completion_mask": ones, "gradients": [1.0]}, tmp_path / "a.pt")
    with pytest.raises(RecordError, match="gradients: a list"):
        check_step(tmp_path / "a.pt", system="trl")
    torch.save({"completion_mask": ones, "prompt_ids": ones, "prompt_mask": ones}, tmp_path / "b.pt")
    with pytest.raises(RecordError, match=r"prompt_ids of torch\.float32"):
        check_step(tmp_path / "b.pt", system="trl")
