import pytest

from workbench.errors import RecordError, SpecError
from workbench.mismatch.settings import sides

ROLLOUTS = [{"prompt_ids": [1], "completion_ids": [2], "sampler_logprobs": [-1.0]}]


def test_the_sampler_is_as_the_trainer_where_it_says_nothing():
    trainer, sampler = sides(
        {"model": "tiny-qwen3", "temperature": 0.7, "head": "float32"}, {"rollouts": ROLLOUTS, "top_k": 5}
    )
    assert (sampler.temperature, sampler.head, sampler.top_k, trainer.top_k) == (0.7, "float32", 5, 0)


def test_a_checkpoint_and_rollouts_alone_are_enough():
    trainer, sampler = sides("tiny-qwen3", ROLLOUTS)
    assert (trainer.model, sampler.rollouts, sampler.precision) == ("tiny-qwen3", ROLLOUTS, "float32")


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(SpecError, match="temprature"):
        sides({"model": "tiny-qwen3", "temprature": 0.7}, ROLLOUTS)


def test_paths_of_a_case_are_relative_to_it(tmp_path):
    (tmp_path / "rollouts.jsonl").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "attribute.yaml").write_text(
        "trainer: {model: tiny-qwen3, older: {step_1: old}}\nsampler: {rollouts: rollouts.jsonl}\n"
    )
    trainer, sampler = sides(tmp_path)
    assert trainer.older == {"step_1": tmp_path / "old"}
    assert (trainer.model, sampler.rollouts) == ("tiny-qwen3", tmp_path / "rollouts.jsonl")


def test_a_folder_without_settings_and_other_keys_are_refused(tmp_path):
    with pytest.raises(RecordError, match=r"attribute\.yaml"):
        sides(tmp_path)
    (tmp_path / "attribute.yaml").write_text("trainer: {}\n")
    with pytest.raises(SpecError, match="keys trainer and sampler"):
        sides(tmp_path)
