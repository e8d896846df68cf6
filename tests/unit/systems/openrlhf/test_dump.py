"""Dumps by OpenRLHF 0.11.2's own loss agree with their settings; others are named (`tests/dumps/openrlhf/write.py`)."""

import contextlib
import functools
import shutil
from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.openrlhf.dump import read_dump

DUMPS = Path(__file__).parents[3] / "dumps/openrlhf"
PENALTY = {"kl": {"use_loss": True, "init_coef": 0.05, "estimator": "k3"}}
SETTINGS = {
    "token_mean": {
        **PENALTY,
        "is_correction_level": "token",
        "is_correction_mode": "clip",
        "is_correction_threshold": [0.9, 1.1],
    },
    "seq_mean": {**PENALTY, "token_level_loss": False, "clip_eps_high": 0.28, "dual_clip": 1.5},
}


def check(name, settings=None, path=None, **advantages):
    return check_step(
        path or DUMPS / name,
        system="openrlhf",
        settings={**SETTINGS[name], **(settings or {})},
        advantages={"estimator": "group_norm", **advantages},
    )


@functools.cache
def right(name):
    """The check of a step under its own settings, which several tests read."""
    return check(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_its_loss_computed_agrees(name):
    result = right(name)
    assert result.ok, str(result)
    agreeing = {stage.name for stage in result.stages if stage.status == "agrees"}
    assert agreeing == {"advantages", "mask and denominator", "coefficients", "loss", "metrics"}


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("token_mean", {"token_level_loss": False}, "the policy term is divided by all trained tokens"),
        ("seq_mean", {"token_level_loss": True}, "the policy term is divided by documents, each over its own"),
        pytest.param("token_mean", {"kl": {**PENALTY["kl"], "estimator": "k1"}}, "k3", marks=pytest.mark.slow),
        pytest.param(
            "token_mean", {"is_correction_mode": "mask"}, "outside their bounds are truncated", marks=pytest.mark.slow
        ),
    ],
)
def test_other_settings_than_it_had_are_named(name, settings, text):
    result = check(name, settings)
    assert result.first.name in ("coefficients", "corrections", "loss")
    assert any(text in cause.description for cause in result.causes), str(result)


def test_another_estimator_is_named():
    result = check("token_mean", estimator="dr_grpo")
    assert result.first.name == "advantages"
    assert any("divided by the deviation of the group" in cause.description for cause in result.causes), str(result)


def test_values_have_their_names():
    dump = read_dump(DUMPS / "token_mean")
    assert dump.layout == {"dp": 2, "micro_batches": 2}
    assert dump.documents["rows"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert dump.documents["group_ids"].tolist() == [0, 1] * 4
    assert dump.loss_mask_T.sum() == dump.counts["tokens"] == 29
    assert torch.bincount(dump.document_ids_T).tolist() == [6, 2, 3, 7, 5, 1, 4, 3]  # no prompt and no padding
    assert (dump.tokens["policy_logprobs"] < 0).sum() == 29
    first = read_restricted(DUMPS / "token_mean/rank_0_micro_0.pt")
    own_C = first["action_mask"][0]
    assert torch.equal(dump.tokens["token_ids"][dump.document_ids_T == 0], first["sequences"][0, 1:][own_C])


def test_a_file_is_one_micro_batch():
    dump = read_dump(DUMPS / "token_mean/rank_1_micro_0.pt")
    assert dump.num_documents == 2
    assert (dump.losses, dump.metrics, dump.layout) == ({}, {}, {})
    assert "coefficients" not in dump.tokens
    assert "one micro-batch of one rank" in dump.notes[-1]


def copied(tmp_path):
    return Path(shutil.copytree(DUMPS / "token_mean", tmp_path / "step"))


def rewrite(folder, name="rank_1_micro_0.pt", **changes):
    content = {**read_restricted(folder / name), **changes}
    torch.save({key: value for key, value in content.items() if value is not None}, folder / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("rank_1_micro_1.pt", "no micro-batch 1 of rank 1"), ("rank_0_micro_0.pt", "no micro-batch 0 of rank 0")],
)
def test_a_missing_file_is_a_gap(tmp_path, name, message):
    folder = copied(tmp_path)
    (folder / name).unlink()
    with pytest.raises(RecordError, match=message):
        read_dump(folder)


def test_a_copied_file_is_an_overlap(tmp_path):
    folder = copied(tmp_path)
    shutil.copy(folder / "rank_0_micro_1.pt", folder / "rank_1_micro_1.pt")
    with pytest.raises(RecordError, match="sample 1 twice"):
        read_dump(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequences": None}, "no sequences in"),
        ({"action_mask": None}, "no action_mask in"),
        ({"advantages": torch.ones(2, 3)}, r"advantages \[2, 3\] for sequences"),
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask \[2, 3\]"),
        ({"advantages": torch.ones(3)}, r"advantages of shape \[3\]"),
        ({"advantages": None}, "advantages in document 0 or document 4, but not in both"),
        ({"rewards": torch.ones(3)}, "3 rewards of 2 rows"),
        ({"n_samples_per_prompt": 2}, "n_samples_per_prompt"),
        ({"loss_batch_info": {"batch_num_tokens": 2.0, "global_batch_size": 1.0}}, "loss_batch_info"),
        ({"accumulated_gradient": 3}, r"accumulated_gradient \[2, 3\]"),
    ],
)
def test_files_that_disagree_are_refused(tmp_path, changes, message):
    folder = copied(tmp_path)
    rewrite(folder, **changes)
    with pytest.raises(RecordError, match=message):
        read_dump(folder)


def test_an_empty_folder_and_another_object_are_refused(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        read_dump(tmp_path)
    torch.save([1], tmp_path / "rank_0_micro_0.pt")
    with pytest.raises(RecordError, match="a list"):
        read_dump(tmp_path)


@pytest.mark.parametrize("place", range(40, 7000, 611))
def test_a_damaged_or_truncated_file_is_read_or_refused(tmp_path, place):
    content = bytearray((DUMPS / "token_mean/rank_0_micro_0.pt").read_bytes())
    file = tmp_path / "rank_0_micro_0.pt"
    file.write_bytes(content[:place])
    with pytest.raises(RecordError):
        read_dump(file)
    content[place % len(content)] ^= 0xFF
    file.write_bytes(content)
    with contextlib.suppress(RecordError):
        read_dump(file)


@pytest.mark.parametrize("name", ["seq_mean", "token_mean"])
def test_prompts_end_where_the_first_action_begins(name):
    """`write.py` gives the samples of the first prompt 3 tokens, those of the second 2."""
    prompts = right(name).numbers.reading.dump.ids["prompt_ids"]
    assert sorted(map(len, prompts)) == [2] * 4 + [3] * 4
