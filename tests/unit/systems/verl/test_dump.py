"""Dumps that verl 0.9.1 wrote agree with their settings, and other settings are named (`tests/dumps/verl/write.py`)."""

import pickle
from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.dumps.step import StepDump
from workbench.dumps.tensordicts import KNOWN
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.verl.dump import read_dump

DUMPS = Path(__file__).parents[3] / "dumps/verl"
CORRECTION = {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 1.1}}
SETTINGS = {
    "token_mean": {"loss_agg_mode": "token-mean", **CORRECTION},
    "sequence_mean_numpy": {
        "loss_agg_mode": "seq-mean-token-mean",
        "use_kl_loss": True,
        "kl_loss_coef": 0.05,
        **CORRECTION,
    },
}


def check(name, settings=None, **advantages):
    return check_step(
        DUMPS / f"{name}.pkl",
        system="verl",
        settings={**SETTINGS[name], **(settings or {})},
        advantages={"estimator": "grpo", **advantages},
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_what_verl_wrote_agrees(name):
    result = check(name)
    assert result.ok, str(result)
    agreeing = {stage.name for stage in result.stages if stage.status == "agrees"}
    assert agreeing == {"advantages", "corrections", "coefficients", "loss", "metrics"}
    assert not result.unknown_metrics
    assert sum(len(stage.compared) for stage in result.stages) >= 30


@pytest.mark.parametrize(
    ("name", "settings", "stage", "text"),
    [
        ("token_mean", {"loss_agg_mode": "seq-mean-token-sum"}, "coefficients", "by all trained tokens of the step"),
        ("sequence_mean_numpy", {"loss_agg_mode": "token-mean"}, "coefficients", "by documents, each over its own"),
        ("sequence_mean_numpy", {"use_kl_loss": False}, "coefficients", ""),
        (
            "token_mean",
            {"rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": 1.1}},
            "corrections",
            "one of the token",
        ),
    ],
)
def test_other_settings_than_verl_had_are_named(name, settings, stage, text):
    result = check(name, settings)
    assert result.first.name == stage
    assert not text or text in result.causes[0].description, str(result)


def test_another_estimator_is_named():
    result = check("token_mean", norm_adv_by_std_in_grpo=False)
    assert result.first.name == "advantages"
    assert result.causes[0].description == "advantages are divided by the deviation of the group"


def test_values_have_their_names():
    dump = read_dump(DUMPS / "token_mean.pkl")
    assert dump.num_documents == 6
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert dump.loss_mask_T.sum() == 27
    assert {"policy_logprobs", "sampler_logprobs", "token_rewards", "correction_weights"} <= {*dump.tokens}
    assert {*dump.losses} == {"policy"}
    assert dump.temperature == 1


def test_generations_are_text():
    result = check_step(DUMPS / "generations/3.jsonl", system="verl", settings={}, advantages={"estimator": "grpo"})
    assert result.verdict == "vacuous"
    assert "text and no tokens" in "\n".join(result.undecided)


def test_a_dict_of_tensors_is_a_batch(tmp_path):
    batch = {"response_mask": torch.ones(2, 3), "old_log_probs": -torch.ones(2, 3), "advantages": torch.ones(2, 3)}
    torch.save(batch, tmp_path / "batch.pt")
    dump = read_dump(tmp_path / "batch.pt")
    assert isinstance(dump, StepDump)
    assert "a hook can add them" in dump.notes[0]


def test_the_norm_of_the_gradient_is_no_metric(monkeypatch):
    batch = read_restricted(DUMPS / "token_mean.pkl", known=KNOWN)
    batch.meta["metrics"]["actor/grad_norm"] = 0.5
    monkeypatch.setattr("workbench.systems.verl.dump.read_restricted", lambda *_, **__: batch)
    dump = read_dump(DUMPS / "token_mean.pkl")
    assert dump.gradient_norm == 0.5
    assert "actor/grad_norm" not in dump.metrics


@pytest.mark.parametrize(("content", "message"), [([1], "a list"), ({"a": torch.ones(2)}, "tensors a")])
def test_what_is_no_batch_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "batch.pt")
    with pytest.raises(RecordError, match=message):
        read_dump(tmp_path / "batch.pt")
    (tmp_path / "batch.pkl").write_bytes(pickle.dumps(content)[:-3])
    with pytest.raises(RecordError):
        read_dump(tmp_path / "batch.pkl")


def test_generations_without_scores_are_refused(tmp_path):
    (tmp_path / "3.jsonl").write_text('{"input": "a"}\n')
    with pytest.raises(RecordError, match="record 0 with input"):
        read_dump(tmp_path / "3.jsonl")


@pytest.mark.parametrize("name", SETTINGS)
def test_prompts_are_read_without_padding(name, tmp_path):
    """`write.py` draws them between 5 and 40, one for three sequences."""
    prompts = read_dump(DUMPS / f"{name}.pkl").ids["prompt_ids"]
    assert len(prompts) == 6
    assert torch.equal(prompts[0], prompts[2])
    assert all(bool(((one >= 5) & (one < 40)).all()) for one in prompts)
    mask = torch.ones(1, 2, dtype=torch.long)
    batch = {"response_mask": mask, "prompts": torch.tensor([[0, 7, 8]])}
    batch["attention_mask"] = torch.tensor([[0, 1, 1, 1, 1]])
    torch.save(batch, tmp_path / "padded.pt")
    assert read_dump(tmp_path / "padded.pt").ids["prompt_ids"][0].tolist() == [7, 8]
