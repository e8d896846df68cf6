"""Dumps that miles 31f1ca96 wrote agree with their settings; mistakes are named. Made by tests/dumps/miles/write.py."""

import shutil
from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.miles.dump import read_dump

DUMPS = Path(__file__).parents[3] / "dumps/miles"
CALL = "policy_loss_debug/rank_0_call_0.pt"


def check(path, **settings):
    options = {"eps_clip_high": 0.28, **settings}
    return check_step(path, system="miles", settings=options, advantages={"advantage_estimator": "grpo"})


@pytest.fixture
def dump(tmp_path):
    for name in ("train_data", "rollout_data", "policy_loss_debug"):
        shutil.copytree(DUMPS / name, tmp_path / name)
    return tmp_path


def change(path, edit):
    content = read_restricted(path)
    edit(content)
    torch.save(content, path)


def test_four_ranks_agree():
    for path in (DUMPS / "train_data", DUMPS / "train_data/3_2.pt"):
        result = check(path)
        assert result.ok, str(result)
        assert {stage.name for stage in result.stages if stage.status == "agrees"} == {"advantages", "coefficients"}


def test_tokens_of_all_ranks_are_in_their_order():
    step = read_dump(DUMPS / "train_data")
    assert torch.bincount(step.document_ids_T).tolist() == [6, 3, 5, 4, 9]
    assert step.tokens["token_ids"].tolist() == [20 + i for n in (6, 3, 5, 4, 7, 2) for i in range(n)]
    assert torch.nonzero(step.tokens["token_mask"] & ~step.loss_mask_T).squeeze(1).tolist() == [2, 3, 19]
    assert step.documents["rewards"].tolist() == [1.0, 0.0, 0.5, 0.0, 1.0]
    assert step.documents["group_ids"].tolist() == [0, 0, 0, 1, 1]
    assert step.layout == {"dp": 2, "micro_batches": 1}


def test_a_micro_batch_has_ratios_and_clip_decisions():
    result = check(DUMPS / CALL)
    assert result.ok, str(result)
    assert {stage.name for stage in result.stages if stage.status == "agrees"} == {"ratios", "clip decisions"}
    assert read_dump(DUMPS / CALL).tokens["clipped"].any()
    assert check(DUMPS / CALL, eps_clip_high=0.2).first.name == "clip decisions"


def test_a_rank_that_counts_twice_is_named(dump):
    for rank in range(4):
        change(dump / f"train_data/3_{rank}.pt", lambda c: [g.mul_(2) for g in c["rollout_data"]["grad_log_probs"]])
    result = check(dump / "train_data")
    assert result.first.name == "coefficients"
    assert "times dp (2)" in "; ".join(cause.description for cause in result.causes), str(result)


def test_log_probabilities_of_another_policy_are_named(dump):
    def stale(content):
        for sample in content["samples"]:
            sample["train_log_probs"] = sample["old_log_probs"]

    change(dump / CALL, stale)
    assert check(dump / CALL).first.name == "ratios"


def test_without_rollout_data_rewards_are_unknown(dump):
    shutil.rmtree(dump / "rollout_data")
    step = read_dump(dump / "train_data")
    assert "rewards" not in step.documents
    assert any("no rollout_data/3.pt" in note for note in step.notes)


def test_equal_ranks_and_earlier_stages_are_left_out(dump):
    shutil.copy(dump / "train_data/3_1.pt", dump / "train_data/3_4.pt")
    shutil.copy(dump / "train_data/3_1.pt", dump / "train_data/3_5.pt")
    change(dump / "train_data/3_5.pt", lambda c: c["rollout_data"].pop("advantages"))
    assert check(dump / "train_data").ok
    notes = " ".join(read_dump(dump / "train_data").notes)
    assert "3_4.pt is the same" in notes
    assert "3_5.pt has no advantages" in notes


def lost(dump):
    (dump / "train_data/3_1.pt").unlink()


def lost_pair(dump):
    for rank in (2, 3):
        (dump / f"train_data/3_{rank}.pt").unlink()


def overlap(dump):
    shutil.copy(dump / "train_data/3_1.pt", dump / "train_data/3_4.pt")
    change(dump / "train_data/3_4.pt", lambda c: c["rollout_data"]["advantages"][0].add_(1))


def other_rollout(dump):
    shutil.copy(dump / "train_data/3_1.pt", dump / "train_data/4_1.pt")


def other_part(dump):
    change(dump / "train_data/3_1.pt", lambda c: c.update(cp_rank=0, cp_size=3))


def padded(dump):
    change(dump / "train_data/3_1.pt", lambda c: c.update(qkv_format="bshd"))


def no_data(dump):
    change(dump / "train_data/3_1.pt", lambda c: c.pop("rollout_data"))


def fewer(dump):
    change(dump / "train_data/3_1.pt", lambda c: c["rollout_data"]["log_probs"].pop())


def other_samples(dump):
    change(dump / "rollout_data/3.pt", lambda c: c["samples"].pop(0))


def no_samples(dump):
    change(dump / "rollout_data/3.pt", lambda c: c.pop("samples"))


def a_list(dump):
    torch.save([1], dump / "train_data/3_1.pt")


def short_mask(dump):
    change(dump / "train_data/3_1.pt", lambda c: c["rollout_data"].update(loss_masks=[torch.ones(1)] * 3))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lost, "no token|tokens of sample"),
        (lost_pair, "3 samples in 2 files, of 6"),
        (overlap, "tokens twice"),
        (other_rollout, "files of rollouts 3, 4"),
        (other_part, "of rank 1"),
        (padded, "no max_seq_lens"),
        (no_data, "with loss_masks"),
        (fewer, "log_probs without 3 entries"),
        (other_samples, "no sample 0"),
        (no_samples, "no samples"),
        (a_list, "a list"),
        (short_mask, "1 loss_masks"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(dump, damage, message):
    damage(dump)
    with pytest.raises(RecordError, match=message):
        read_dump(dump / "train_data")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("samples"), "no samples"),
        (lambda c: c["samples"][0].update(response_length=9), "of a response of 9"),
        (lambda c: c.pop("pg_loss"), "pg_loss"),
        (lambda c: c.update(ppo_kl=torch.ones(3)), "3 ppo_kl"),
        (lambda c: c["samples"][0].pop("advantages"), "sample 0 with"),
    ],
)
def test_micro_batches_that_do_not_fit_are_refused(dump, edit, message):
    change(dump / CALL, edit)
    with pytest.raises(RecordError, match=message):
        read_dump(dump / CALL)


def test_padded_sequences_are_cut_by_their_padded_length(dump):
    for rank in range(4):
        change(
            dump / f"train_data/3_{rank}.pt",
            lambda c: (
                c.update(qkv_format="bshd"),
                c["rollout_data"].update(max_seq_lens=c["rollout_data"]["total_lengths"]),
            ),
        )
    assert check(dump / "train_data").ok


def test_damaged_files_are_refused(dump):
    whole = (dump / CALL).read_bytes()
    for content in (b"", whole[:-200], whole[40:]):
        (dump / CALL).write_bytes(content)
        with pytest.raises(RecordError):
            read_dump(dump / CALL)
    with pytest.raises(RecordError, match="rollouts none"):
        read_dump(dump)
