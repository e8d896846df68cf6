"""Streams that PipelineRL 58d39345 wrote agree; mistakes are named. Made by tests/dumps/pipelinerl/write.py."""

import json
import shutil
from pathlib import Path

import pytest

from workbench.check import check_step
from workbench.errors import RecordError
from workbench.systems.pipelinerl.dump import estimator_of, read_dump

DUMPS = Path(__file__).parents[3] / "dumps/pipelinerl"
TOPIC = "streams/training_data/0"


def check(path, **advantages):
    options = {"divide_advantage_by_std": True, **advantages}
    return check_step(path, system="pipelinerl", settings={}, advantages=options)


@pytest.fixture
def topic(tmp_path):
    shutil.copytree(DUMPS / "packed" / TOPIC, tmp_path / "0")
    return tmp_path / "0"


def change(path, edit):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    edit(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_what_pipelinerl_wrote_agrees(name):
    result = check(DUMPS / name / TOPIC)
    assert result.ok, str(result)
    assert {stage.name for stage in result.stages if stage.status == "agrees"} == {"advantages"}


def test_both_have_the_same_documents():
    packed, padded = (read_dump(DUMPS / name / TOPIC) for name in ("packed", "padded"))
    # The partitions of the packed one have samples 0, 1, 4 and 2, 3, 5.
    lengths = [int(n) for n in packed.document_ids_T.unique(return_counts=True)[1]]
    assert lengths == [6, 3, 7, 5, 4, 2]
    assert packed.documents["rows"].tolist() == [0, 0, 1, 2, 2, 3]
    assert packed.layout == {"dp": 2, "micro_batches": 2}
    assert [int(n) for n in padded.document_ids_T.unique(return_counts=True)[1]] == [6, 3, 5, 4, 7, 2]
    assert sorted(packed.tokens["old_logprobs"].tolist()) == sorted(padded.tokens["old_logprobs"].tolist())
    assert packed.documents["group_ids"].tolist() == [0, 0, 1, 0, 1, 1]


def test_a_mean_of_the_whole_group_is_named(topic):
    def centred(records):
        for record in records:
            record["advantages"] = [[value * 2 / 3 for value in record["advantages"][0]]]

    for partition in (0, 1):
        change(topic / f"{partition}/0.jsonl", centred)
    result = check(topic)
    assert result.first.name == "advantages"
    assert any("advantages times 0.66666" in cause.description for cause in result.causes), str(result)


def test_other_options_are_named():
    assert check(DUMPS / "packed" / TOPIC, divide_advantage_by_std=False).first.name == "advantages"
    assert estimator_of({"divide_advantage_by_std": False})[1]["scale"] == "none"


def test_tokens_of_a_tool_do_not_train(topic):
    change(topic / "0/0.jsonl", lambda r: r[0]["labels"][0].__setitem__(5, -100))
    dump = read_dump(topic)
    assert (dump.tokens["token_mask"] & ~dump.loss_mask_T).nonzero().squeeze(1).tolist() == [2]


def test_prompts_with_one_completion_have_no_groups(topic):
    shutil.rmtree(topic / "1")
    dump = read_dump(topic)
    assert "rewards" not in dump.documents
    assert any("one completion" in note for note in dump.notes)


def test_sentinels_are_left_out(topic):
    change(topic / "0/0.jsonl", lambda r: r.append({**r[0], "sentinel": True}))
    assert read_dump(topic).num_documents == 6


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r[0].pop("advantages"), "line 1 with"),
        (lambda r: r[0].update(old_logprobs=[[0.0]]), r"old_logprobs \[1, 1\]"),
        (lambda r: r[0].update(seq_boundaries=[0, 9, 15]), "seq_boundaries"),
        (lambda r: r[0].update(position_ids=[[3] * 16]), "a slice that begins at position .3"),
        (lambda r: r[0].update(labels="a"), "labels that is not numbers|labels of shape"),
        (lambda r: r[0]["old_logprobs"][0].__setitem__(4, None), "nan at document 0"),
        (lambda r: r[0]["old_logprobs"][0].__setitem__(4, 0.5), "above 0"),
    ],
)
def test_what_does_not_fit_is_refused(topic, edit, message):
    change(topic / "0/0.jsonl", edit)
    with pytest.raises(RecordError, match=message):
        read_dump(topic)


def test_a_missing_partition_is_refused(topic):
    shutil.rmtree(topic / "0")
    with pytest.raises(RecordError, match="partitions 1"):
        read_dump(topic)
    shutil.rmtree(topic / "1")
    with pytest.raises(RecordError, match="partitions none"):
        read_dump(topic)


def test_damaged_files_are_refused(topic):
    path = topic / "0/0.jsonl"
    whole = path.read_bytes()
    assert read_dump(topic / "0").num_documents == read_dump(path).num_documents == 3
    for content in (b"", whole[:-40], b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(RecordError):
            read_dump(path)


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_prompts_are_those_that_were_written(name):
    prompts = check(DUMPS / name / TOPIC).numbers.reading.dump.ids["prompt_ids"]
    assert sorted(one.tolist() for one in prompts) == [[4, 5]] * 3 + [[7, 8, 9]] * 3
