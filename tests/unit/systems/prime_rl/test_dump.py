"""What prime-rl 559b4477 exported agrees; mistakes are named. Made by tests/dumps/prime_rl/write.py."""

import json
import shutil
from pathlib import Path

import pytest

from workbench.check import check_step
from workbench.errors import RecordError
from workbench.systems.prime_rl.dump import read_dump

DUMP = Path(__file__).parents[3] / "dumps/prime_rl/token_exports/step_4"


def check(path, **settings):
    return check_step(path, system="prime_rl", settings=settings)


@pytest.fixture
def step(tmp_path):
    shutil.copytree(DUMP, tmp_path / "step_4")
    return tmp_path / "step_4"


def change(path, edit):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    edit(records)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_prime_rl_exported_agrees():
    result = check(DUMP)
    assert result.ok, str(result)
    assert {stage.name for stage in result.stages if stage.status == "agrees"} == {"ratios", "clip decisions"}
    assert read_dump(DUMP).tokens["clipped"].any()


def test_packed_sequences_of_all_ranks_are_documents():
    dump = read_dump(DUMP)
    assert dump.documents["rows"].tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert dump.layout == {"dp": 2, "micro_batches": 2}
    assert [int(n) for n in dump.document_ids_T.unique(return_counts=True)[1]] == [5, 3, 4, 2, 1, 7, 3, 6]
    assert (dump.tokens["token_mask"] & ~dump.loss_mask_T).sum() == 3  # a tool's


def test_other_thresholds_than_those_of_the_run_are_named():
    assert check(DUMP, dppo_mask_low=0.02, dppo_mask_high=0.02).first.name == "clip decisions"


def test_a_shifted_log_probability_is_named(step):
    def shift(records):
        for record in records:
            record["trainer_logprobs"] = [record["trainer_logprobs"][-1], *record["trainer_logprobs"][:-1]]

    for rank in (0, 1):
        change(step / f"rank_{rank}.jsonl", shift)
    assert check(step).first.name == "ratios"


def test_one_rank_is_read_alone():
    dump = read_dump(DUMP / "rank_1.jsonl")
    assert dump.layout == {"dp": 1, "micro_batches": 2}
    assert any("one rank" in note for note in dump.notes)


def test_a_loss_without_ratios_has_none(step):
    def without(records):
        for record in records:
            none = [None] * len(record["loss_mask"])
            record |= {"importance_ratio": none, "is_masked": none}

    change(step / "rank_0.jsonl", without)
    assert {"ratios", "clipped"}.isdisjoint(read_dump(step).tokens)


def test_tokens_of_other_components_do_not_train(step):
    def weighted(records):
        records[0]["rl_weights"] = [0.0 if i == 3 else 1.0 for i in range(len(records[0]["loss_mask"]))]

    before = read_dump(step).loss_mask_T.sum()
    change(step / "rank_0.jsonl", weighted)
    assert read_dump(step).loss_mask_T.sum() == before - 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r[0].update(schema_version=2), "schema_version 2"),
        (lambda r: r.pop(1), "sequence 2 after 1 sequences"),
        (lambda r: r.append(r[0]), "sequence 0 of micro-batch 0 of rank 0 twice"),
        (lambda r: r[0].update(rank=1), "of rank 1"),
        (lambda r: r[0].update(rank="a"), "whole numbers"),
        (lambda r: r[0].update(step=5), "steps 4, 5"),
        (lambda r: r[0].update(ce_weights=[1.0] * 7), "with ce_weights"),
        (lambda r: r[0].update(rl_weights=[0.5] * 7), "rl_weights other than 0 and 1"),
        (lambda r: r[0]["entropy"].pop(), "sequence 0 with"),
        (lambda r: r[0].pop("trainer_logprobs"), "sequence 0 with"),
        (lambda r: r[0].update(trainer_logprobs=[None] * 7), "nan at document 0"),
    ],
)
def test_what_does_not_fit_is_refused(step, edit, message):
    change(step / "rank_0.jsonl", edit)
    with pytest.raises(RecordError, match=message):
        read_dump(step)


def test_a_step_without_all_ranks_is_refused(step):
    shutil.copy(step / "rank_1.jsonl", step / "rank_3.jsonl")
    with pytest.raises(RecordError, match="ranks 0, 1, 3"):
        read_dump(step)
    (step / "rank_3.jsonl").unlink()
    (step / "STABLE").unlink()
    with pytest.raises(RecordError, match="no STABLE"):
        read_dump(step)
    with pytest.raises(RecordError, match="no rank_"):
        read_dump(step.parent)


def test_damaged_files_are_refused(step):
    whole = (step / "rank_0.jsonl").read_bytes()
    for content in (b"", whole[:-40], b"\xff\xfe"):
        (step / "rank_0.jsonl").write_bytes(content)
        with pytest.raises(RecordError):
            read_dump(step)
