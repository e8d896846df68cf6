"""Dumps that slime 624b824a wrote agree with their settings; mistakes are named. Made by tests/dumps/slime/write.py."""

from pathlib import Path

import pytest
import torch

from workbench.check import check_step
from workbench.errors import RecordError
from workbench.rollouts.torch_files import read_restricted
from workbench.systems.slime.dump import read_dump

DUMPS = Path(__file__).parents[3] / "dumps/slime"


def check(path, **settings):
    options = {"eps_clip_high": 0.28, **settings}
    return check_step(path, system="slime", settings=options, advantages={"advantage_estimator": "grpo"})


def changed(tmp_path, change, name="train"):
    content = read_restricted(DUMPS / f"{name}.pt")
    change(content)
    torch.save(content, tmp_path / "3.pt")
    return tmp_path / "3.pt"


@pytest.mark.parametrize(
    ("name", "stages"), [("train", {"advantages", "coefficients"}), ("segments", {"coefficients"})]
)
def test_what_slime_wrote_agrees(name, stages):
    result = check(DUMPS / f"{name}.pt")
    assert result.ok, str(result)
    assert {stage.name for stage in result.stages if stage.status == "agrees"} == stages


def test_ranks_micro_batches_tools_and_groups_have_their_places():
    dump = read_dump(DUMPS / "train.pt")
    assert dump.layout == {"dp": 2, "micro_batches": 2}
    assert dump.documents["rows"].tolist() == [0, 2, 2, 0, 1, 3]
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert dump.documents["rewards"].tolist() == [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]
    assert torch.bincount(dump.document_ids_T).tolist() == [6, 3, 5, 4, 7, 2]
    assert torch.nonzero(dump.tokens["token_mask"] & ~dump.loss_mask_T).squeeze(1).tolist() == [2, 3, 19]
    assert dump.tokens["token_ids"][:3].tolist() == [20, 21, 22]


def test_turns_of_a_rollout_are_one_document():
    dump = read_dump(DUMPS / "segments.pt")
    assert torch.bincount(dump.document_ids_T).tolist() == [6, 3, 5, 4, 9]
    assert {"rewards", "rows"}.isdisjoint(dump.documents)
    assert any("several samples" in note for note in dump.notes)


def scale_gradients(content):
    for sample in content["samples"]:
        sample["grad_log_probs"] = sample["grad_log_probs"] * 2


def population_deviation(content):
    for sample in content["samples"]:
        sample["advantages"] = sample["advantages"] * (3 / 2) ** 0.5


def mean_of_segments(content):
    # Each segment over its own tokens: 7 of them are in document 4, which has 8 trained ones.
    for number, tokens in ((4, 6), (5, 2)):
        sample = content["samples"][number]
        sample["grad_log_probs"] = sample["grad_log_probs"] * 8 / tokens


@pytest.mark.parametrize(
    ("name", "change", "stage", "text"),
    [
        ("train", scale_gradients, "coefficients", "times dp (2)"),
        ("train", population_deviation, "advantages", "divides by n"),
        ("segments", mean_of_segments, "coefficients", ""),
    ],
)
def test_a_mistake_in_a_dump_is_named(tmp_path, name, change, stage, text):
    result = check(changed(tmp_path, change, name))
    assert result.first.name == stage, str(result)
    assert not text or text in "; ".join(cause.description for cause in result.causes), str(result)


def test_other_settings_than_slime_had_are_named():
    result = check(DUMPS / "train.pt", calculate_per_token_loss=True)
    assert result.first.name == "coefficients"
    assert "by documents, each over its own" in result.causes[0].description


def test_rollout_data_has_rewards_and_no_advantages():
    dump = read_dump(DUMPS / "rollout.pt")
    assert dump.documents["rewards"].tolist() == [1.0, 0.0, 0.5, 0.0, 1.0, 1.0]
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert dump.loss_mask_T.sum() == 24
    assert "sampler_logprobs" in dump.tokens
    assert check(DUMPS / "rollout.pt").verdict == "vacuous"


def other_format(content):
    content["format_version"] = 1


def no_samples(content):
    content["samples"] = []


def twice(content):
    content["dp_shards"][1]["partition"][0] = 0


def lost_sample(content):
    del content["samples"][3]


def same_position(content):
    content["samples"][3]["rollout_position"] = 4


def no_micro_batch(content):
    content["dp_shards"][0]["micro_batch_indices"] = [[[0, 1]]]


def two_micro_batches(content):
    content["dp_shards"][0]["micro_batch_indices"] = [[[0, 1], [1, 2]]]


def other_rank(content):
    content["dp_shards"][0]["micro_batch_indices"] = [[[0, 1], [3]]]


def short(content):
    content["samples"][1]["advantages"] = content["samples"][1]["advantages"][:-1]


def text(content):
    content["samples"][1]["log_probs"] = ["a"]


def no_mask(content):
    del content["samples"][1]["loss_masks"]


def one_only(content):
    del content["samples"][1]["advantages"]


def no_dict(content):
    content["samples"][2] = 3


def no_shards(content):
    content["dp_shards"] = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_format, "format_version 1"),
        (no_samples, "found: format_version"),
        (twice, "sample 0 in the shards of ranks 0 and 1"),
        (lost_sample, "sample 3 in the shards or the samples"),
        (same_position, "two samples at position 4"),
        (no_micro_batch, "sample 4 in no micro-batch"),
        (two_micro_batches, "sample 3 in two micro-batches"),
        (other_rank, "micro-batch 1 of rank 0 with sample 3, of 3"),
        (short, "document 1 with"),
        (text, "sample 1: log_probs that is not numbers"),
        (no_mask, "sample 1 with"),
        (one_only, "advantages in document 0 or document 1"),
        (no_dict, "sample 2: a int"),
        (no_shards, "dp_shards that are no list"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    with pytest.raises(RecordError, match=message):
        read_dump(changed(tmp_path, change))


def test_several_steps_have_advantages_only(tmp_path):
    def several(content):
        for shard in content["dp_shards"]:
            shard |= {"num_microbatches": [1, 1], "micro_batch_indices": [[[0, 1]], [[2]]]}

    dump = read_dump(changed(tmp_path, several))
    assert "coefficients" not in dump.tokens
    assert not dump.layout
    assert any("2 optimizer steps" in note for note in dump.notes)


def test_a_damaged_file_is_refused(tmp_path):
    whole = (DUMPS / "train.pt").read_bytes()
    for content in (b"", whole[:-200], whole[40:]):
        (tmp_path / "3.pt").write_bytes(content)
        with pytest.raises(RecordError):
            read_dump(tmp_path / "3.pt")


def test_prompts_are_read_where_a_document_is_one_sample():
    prompts = read_dump(DUMPS / "train.pt").ids["prompt_ids"]
    assert [one.tolist() for one in prompts] == [[7, 8, 9]] * 3 + [[4, 5]] * 3
    assert not read_dump(DUMPS / "segments.pt").ids
