"""What NeMo-RL 7ea279ab logged agrees with its settings; mistakes are named. Made by tests/dumps/nemo_rl/write.py."""

import functools
import json
from pathlib import Path

import pytest

from workbench.check import check_step
from workbench.errors import RecordError, SpecError
from workbench.systems.nemo_rl.dump import estimator_of, read_dump

DUMP = Path(__file__).parents[3] / "dumps/nemo_rl/train_data_step3.jsonl"
SETTINGS = {
    "ratio_clip_max": 0.28,
    "reference_policy_kl_penalty": 0.0,
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
    "truncated_importance_sampling_ratio": 1.1,
}


def check(path, advantages=None, **settings):
    return check_step(
        path, system="nemo_rl", settings={**SETTINGS, **settings}, advantages=advantages or {"normalize_rewards": True}
    )


def changed(tmp_path, change):
    records = [json.loads(line) for line in DUMP.read_text().splitlines()]
    change(records)
    path = tmp_path / "train_data_step3.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@functools.cache
def right():
    """The check of the step under its own settings, which several tests read."""
    return check(DUMP)


def test_what_nemo_rl_logged_agrees():
    result = right()
    assert result.ok, str(result)
    assert {stage.name for stage in result.stages if stage.status == "agrees"} == {"advantages", "coefficients"}


def test_prompts_masks_and_groups_have_their_places():
    dump = read_dump(DUMP)
    assert dump.tokens["token_ids"].tolist() == [20 + i for n in (6, 3, 5, 4, 7, 2) for i in range(n)]
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert not dump.loss_mask_T[[2, 3, 25, 26]].any()  # of a tool, and the masked sample
    assert dump.loss_mask_T.sum() == 23


def scaled(records):
    for record in records:
        record["grad_curr_logprobs"] = [[value * 2 for value in record["grad_curr_logprobs"][0]]]


def mean_of_all(records):
    for record in records:
        reward = record["rewards"][0] - sum(r["rewards"][0] for r in records) / 6
        record["advantages"] = [[reward] * 12]


@pytest.mark.parametrize(("change", "stage"), [(scaled, "coefficients"), (mean_of_all, "advantages")])
def test_a_mistake_in_a_log_is_named(tmp_path, change, stage):
    assert check(changed(tmp_path, change)).first.name == stage


def test_other_settings_are_named():
    result = check(DUMP, token_level_loss=False)
    assert result.first.name == "coefficients"
    assert "by all trained tokens of the step" in result.causes[0].description
    assert check(DUMP, {"use_leave_one_out_baseline": False}).first.name == "advantages"


def test_filtered_rewards_are_those_of_the_advantages(tmp_path):
    def filtered(records):
        for record in records:
            record["filtered_rewards"], record["rewards"] = record["rewards"], [9.0]

    assert check(changed(tmp_path, filtered)).ok


def test_without_a_hook_only_advantages_are_checked(tmp_path):
    def plain(records):
        for record in records:
            del record["curr_logprobs"], record["grad_curr_logprobs"]

    path = changed(tmp_path, plain)
    assert {stage.name for stage in check(path).stages if stage.status == "agrees"} == {"advantages"}
    assert any("a hook can add them" in note for note in read_dump(path).notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop(2), "idx 3 in line 3"),
        (lambda r: r.insert(2, r[2]), "idx 2 in line 4"),
        (lambda r: r[1].pop("advantages"), "line 2 with"),
        (lambda r: r[1].update(token_ids=[["a"]]), "token_ids that is not numbers"),
        (lambda r: r[1].update(rewards=[1.0, 2.0]), "rewards of 2 samples"),
        (lambda r: r[1].update(input_lengths=99), "12 values, of input_lengths 99"),
        (lambda r: r[1].update(sample_loss_mask=[0.5]), "sample_loss_mask 0.5"),
        (lambda r: r[1].pop("rewards"), "nan|not finite"),
        (lambda r: r[1].update(prev_logprobs=[[None] * 12]), "nan at document 1"),
        (lambda r: r[1].pop("prev_logprobs"), "old_logprobs in document 0 or document 1"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, message):
    with pytest.raises(RecordError, match=message):
        read_dump(changed(tmp_path, change))


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    for content in (b"", DUMP.read_bytes()[:-20], b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(RecordError):
            read_dump(path)


def test_options_name_an_estimator():
    assert estimator_of({"normalize_rewards": False})[1]["scale"] == "none"
    assert estimator_of({"use_leave_one_out_baseline": False})[1]["baseline"] == "mean"
    with pytest.raises(SpecError, match="normalise"):
        estimator_of({"normalise_rewards": True})


def test_prompts_are_those_that_were_written():
    prompts = right().numbers.reading.dump.ids["prompt_ids"]
    assert [one.tolist() for one in prompts] == [[7, 8, 9]] * 3 + [[4, 5]] * 3
