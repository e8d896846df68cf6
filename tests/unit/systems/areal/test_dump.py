"""Trajectories of AReaL 4aef98d8, and inputs of the loss of AReaL 1.0.4, by tests/dumps/areal/write.py."""

import contextlib
import shutil
from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.areal.dump import read_dump

DUMPS = Path(__file__).parents[3] / "dumps/areal"
DUMP = DUMPS / "rollout/6"


def test_tasks_are_groups():
    dump = read_dump(DUMP)
    assert dump.documents["rewards"].tolist() == [1.0, 0.0, 0.5, 0.0, 1.0]
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1]
    assert any("task 1" in note for note in dump.notes)
    assert not any("task" in note for note in read_dump(DUMP / "0.jsonl").notes)


def test_text_alone_decides_nothing():
    result = check_step(DUMP, system="areal", settings={})
    assert result.verdict == "vacuous"
    assert "text and no tokens" in "\n".join(result.undecided)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"task_id": 0, "sample_idx": 0}\n', "reward None"),
        ('{"task_id": 0, "sample_idx": 0, "reward": 1}\n' * 2, "sample 0 of task 0 twice"),
        ("", "no record"),
        ('{"task_id"', "line 1"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, content, message):
    (tmp_path / "0.jsonl").write_text(content)
    with pytest.raises(RecordError, match=message):
        read_dump(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"no \*.jsonl"):
        read_dump(tmp_path)
    shutil.copy(DUMP / "0.jsonl", tmp_path)
    assert read_dump(tmp_path).num_documents == 3


# ---- inputs of the loss -------------------------------------------------------------------------------------------

LOSS = DUMPS / "loss_inputs"
SETTINGS = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 3.0}


def test_what_its_loss_computed_agrees():
    result = check_step(LOSS, system="areal", settings=SETTINGS)
    assert result.ok, str(result)
    assert [stage.name for stage in result.stages if stage.status == "agrees"] == ["coefficients", "loss"]


@pytest.mark.parametrize(
    "settings",
    [
        {"importance_sampling_level": "sequence"},
        pytest.param({"eps_clip_higher": 0.05}, marks=pytest.mark.slow),
        pytest.param({"use_sapo_loss": True}, marks=pytest.mark.slow),
    ],
)
def test_other_settings_differ(settings):
    assert check_step(LOSS, system="areal", settings=SETTINGS | settings).first.name == "coefficients"


def test_values_of_the_loss_have_their_names():
    dump = read_dump(LOSS)
    assert dump.layout == {"dp": 2, "micro_batches": 2}
    assert dump.documents["rows"].tolist() == [0, 0, 1, 2, 2, 3]
    assert torch.bincount(dump.document_ids_T).tolist() == [6, 3, 5, 4, 2, 7]  # completions, without their prompts
    assert dump.loss_mask_T.sum() == 23
    assert {"old_logprobs", "sampler_logprobs", "policy_logprobs"} <= {*dump.tokens}
    first = read_restricted(LOSS / "rank_0_micro_0.pt")
    assert torch.equal(dump.tokens["token_ids"][dump.document_ids_T == 0], first["input_ids"][3:9])


def test_a_file_of_the_loss_is_one_micro_batch():
    dump = read_dump(LOSS / "rank_1_micro_0.pt")
    assert dump.num_documents == 2
    assert (dump.losses, dump.layout) == ({}, {})
    assert "coefficients" not in dump.tokens
    assert "one micro-batch of one rank" in dump.notes[-1]


def rewritten(tmp_path, **changes):
    folder = Path(shutil.copytree(LOSS, tmp_path / "step"))
    for file in folder.glob("*.pt"):
        content = {**read_restricted(file), **changes}
        torch.save({key: value for key, value in content.items() if value is not None}, file)
    return folder


def test_without_prox_logp_the_ratio_is_against_the_sampler(tmp_path):
    dump = read_dump(rewritten(tmp_path, prox_logp=None))
    assert torch.equal(dump.tokens["old_logprobs"], dump.tokens["sampler_logprobs"])
    assert "no prox_logp" in dump.notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": None}, "no cu_seqlens in"),
        ({"cu_seqlens": torch.tensor([0, 3, 3])}, r"cu_seqlens \[0, 3, 3\]"),
        ({"cu_seqlens": torch.tensor([1, 3])}, r"cu_seqlens \[1, 3\]"),
        ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens \[0\]"),
        ({"cu_seqlens": torch.tensor([0, 2, 5])}, "of 5 packed positions"),
        ({"advantages": torch.ones(3)}, "3 advantages, of"),
        ({"advantages": torch.ones(3, 2)}, r"advantages of shape \[3, 2\]"),
    ],
)
def test_inputs_that_disagree_are_refused(tmp_path, changes, message):
    with pytest.raises(RecordError, match=message):
        read_dump(rewritten(tmp_path, **changes))


def test_a_missing_micro_batch_is_a_gap(tmp_path):
    folder = rewritten(tmp_path)
    (folder / "rank_0_micro_1.pt").unlink()
    with pytest.raises(RecordError, match="no micro-batch 1 of rank 0"):
        read_dump(folder)
    torch.save([1], folder / "rank_0_micro_1.pt")
    with pytest.raises(RecordError, match="a list"):
        read_dump(folder)


@pytest.mark.parametrize("place", range(40, 3800, 419))
def test_a_damaged_or_truncated_file_is_read_or_refused(tmp_path, place):
    content, file = bytearray((LOSS / "rank_0_micro_0.pt").read_bytes()), tmp_path / "rank_0_micro_0.pt"
    file.write_bytes(content[:place])
    with pytest.raises(RecordError):
        read_dump(file)
    content[place] ^= 0xFF
    file.write_bytes(content)
    with contextlib.suppress(RecordError):
        read_dump(file)
