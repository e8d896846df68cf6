"""Dumps that SkyRL 0.3.0 wrote agree with their settings; other settings are named (`tests/dumps/skyrl/write.py`)."""

import contextlib
import pickle
from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.dumps.tensordicts import SKYRL
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.skyrl.dump import read_dump

DUMPS = Path(__file__).parents[3] / "dumps/skyrl/dumped_data"
PLAIN = {
    "kl_loss_coef": 0.05,
    "off_policy_correction": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
}
SETTINGS = {
    "token_mean": PLAIN,
    "sequence_mean": {
        **PLAIN,
        "loss_reduction": "sequence_mean",
        "policy_loss_type": "dual_clip",
        "clip_ratio_c": 1.5,
    },
}


def check(name, settings=None, **advantages):
    return check_step(
        DUMPS / f"{name}.pkl",
        system="skyrl",
        settings={**SETTINGS[name], **(settings or {})},
        advantages={"advantage_estimator": "grpo", **advantages},
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_what_skyrl_wrote_agrees(name):
    result = check(name)
    assert result.ok, str(result)
    agreeing = {stage.name for stage in result.stages if stage.status == "agrees"}
    assert agreeing == {"advantages", "coefficients", "loss", "metrics"}
    assert sum(len(stage.compared) for stage in result.stages) == 9


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("token_mean", {"loss_reduction": "sequence_mean"}, "by all trained tokens of the step"),
        pytest.param(
            "sequence_mean", {"loss_reduction": "token_mean"}, "by documents, each over its own", marks=pytest.mark.slow
        ),
        pytest.param("sequence_mean", {"eps_clip_high": 0.05}, "clip", marks=pytest.mark.slow),
        ("token_mean", {"kl_loss_coef": 0.1}, "the KL penalty is weighed by 0.05"),
        pytest.param("token_mean", {"off_policy_correction": {}}, "", marks=pytest.mark.slow),
    ],
)
def test_other_settings_than_skyrl_had_are_named(name, settings, text):
    result = check(name, settings)
    assert result.first.name == "coefficients"
    assert text in " ".join(cause.description for cause in result.causes), str(result)


def test_another_estimator_is_named():
    result = check("token_mean", grpo_norm_by_std=False)
    assert result.first.name == "advantages"
    assert result.causes[0].description == "advantages are divided by the deviation of the group"


def test_what_skyrl_writes_without_a_hook():
    dump = read_dump(DUMPS / "global_step_1_training_input.pkl")
    assert dump.num_documents == 7  # the eighth pads the batch to two ranks
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert {"old_logprobs", "sampler_logprobs", "ref_logprobs", "advantages", "token_ids"} <= {*dump.tokens}
    assert dump.tokens["token_mask"].all()
    assert (dump.tokens["token_ids"] >= 10).all()  # responses, no prompt and no padding
    assert [note.split(" ")[0] for note in dump.notes] == ["SkyRL", "1", "SkyRL"]
    result = check_step(dump, settings=PLAIN)
    assert result.verdict == "vacuous"


def content(name="token_mean"):
    return read_restricted(DUMPS / f"{name}.pkl", known=SKYRL)


def rewritten(tmp_path, monkeypatch, tensors=None, **metadata):
    """The dump of a batch with other contents; None removes one."""
    batch = content()
    for name, value in (tensors or {}).items():
        batch.tensors[name] = value
    for name, value in metadata.items():
        batch.metadata[name] = value
    monkeypatch.setattr("workbench.systems.skyrl.dump.read_restricted", lambda *_, **__: batch)
    return read_dump(tmp_path / "step.pkl")


def test_several_mini_batches_are_several_steps(tmp_path, monkeypatch):
    dump = rewritten(tmp_path, monkeypatch, policy_mini_batch_boundaries=[(0, 5), (5, 8)])
    assert "coefficients" not in dump.tokens
    assert (dump.losses, dump.metrics) == ({}, {})
    assert "2 mini-batches, each an optimizer step" in dump.notes[0]


def test_metrics_need_the_split(tmp_path, monkeypatch):
    dump = rewritten(tmp_path, monkeypatch, dp_size=None)
    assert (len(dump.losses), dump.metrics) == (3, {})
    assert "dp_size" in dump.notes[0]
    status = {**content().metadata["status"], "grad_norm": 0.5}
    assert rewritten(tmp_path, monkeypatch, status=status).gradient_norm == 0.5
    assert rewritten(tmp_path, monkeypatch, status=status, pad_size=1).gradient_norm is None
    two = rewritten(tmp_path, monkeypatch, dp_size=2, micro_train_batch_size_per_gpu=3)
    assert two.documents["rows"].tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    assert two.layout == {"dp": 2, "micro_batches": 2}


def test_rewards_of_steps_are_not_those_of_trajectories(tmp_path, monkeypatch):
    dump = rewritten(tmp_path, monkeypatch, is_last_step=[True] * 7 + [False])
    assert "rewards" not in dump.documents
    assert "steps of trajectories" in dump.notes[0]


def test_prompts_are_those_of_their_ids_or_of_their_boundaries(tmp_path, monkeypatch):
    by_id = read_dump(DUMPS / "token_mean.pkl").documents["group_ids"]
    by_bounds = rewritten(tmp_path, monkeypatch, prompt_uids=None).documents["group_ids"]
    assert torch.equal(by_id, by_bounds)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"loss_mask": None}, {}, "no loss_mask in"),
        ({"advantages": torch.ones(3, 7)}, {}, "advantages without 8 rows"),
        ({"advantages": torch.ones(8, 3)}, {}, r"advantages \[8, 3\]"),
        ({"sequences": torch.ones(8, 3)}, {}, r"sequences \[8, 3\]"),
        ({}, {"pad_size": 8}, "pad_size 8 of 8 rows"),
        ({}, {"pad_size": "1"}, "pad_size '1'"),
        ({}, {"dp_size": 3}, "dp_size 3"),
        ({}, {"prompt_uids": ["a"]}, "prompt_uids that are not 8"),
        ({}, {"prompt_uids": None, "policy_prompt_boundaries": [(0, 3), (2, 8)]}, "prompt 1 with rows 2 to 8"),
        ({}, {"prompt_uids": None, "policy_prompt_boundaries": [(0, 3), (5, 8)]}, "prompt 1 with rows 5 to 8"),
        ({}, {"prompt_uids": None, "policy_prompt_boundaries": [(0, 3)]}, "prompts up to row 3"),
        ({}, {"prompt_uids": None, "policy_prompt_boundaries": 3}, "policy_prompt_boundaries with 3"),
    ],
)
def test_a_batch_that_disagrees_with_itself_is_refused(tmp_path, monkeypatch, tensors, metadata, message):
    with pytest.raises(RecordError, match=message):
        rewritten(tmp_path, monkeypatch, tensors, **metadata)


@pytest.mark.parametrize("place", [0, 1, *range(30, 5000, 331)])
def test_a_damaged_or_truncated_file_is_read_or_refused(tmp_path, place):
    content, file = bytearray((DUMPS / "token_mean.pkl").read_bytes()), tmp_path / "step.pkl"
    file.write_bytes(content[:place])
    with pytest.raises(RecordError):
        read_dump(file)
    content[place] ^= 0xFF
    file.write_bytes(content)
    with contextlib.suppress(RecordError):
        read_dump(file)


class Call:
    def __reduce__(self):
        return print, ("called",)


@pytest.mark.parametrize("thing", [Call(), [1], {"a": 1}])
def test_another_pickle_is_refused_and_nothing_is_called(tmp_path, thing, capsys):
    file = tmp_path / "step.pkl"
    file.write_bytes(pickle.dumps(thing))
    with pytest.raises(RecordError, match=r"builtins.print|a list|a dict"):
        read_dump(file)
    assert not capsys.readouterr().out
