"""The measurement on few documents, and what the saved record must show."""

from dataclasses import replace

import pytest

from experiments.precision import measure as precision
from experiments.precision.page import load_record, median_of
from workbench.diagnose.noise import Noise
from workbench.policy.decoder import tiny_qwen3
from workbench.specs.precision import PRESETS

NAMES = ("bf16_mixed", "bf16_pure", "fp8_rowwise")


@pytest.fixture(scope="module")
def record():
    lab = replace(precision.LABS["precision"], batches=precision.parts_of_rollouts(documents=8, batches=1), steps=2)
    return precision.measure(lab, names=NAMES)


def test_the_truth_is_measured_first_and_has_no_error(record):
    assert list(record["choices"]) == ["float64", *NAMES]
    [batch] = record["choices"]["float64"]["batches"]
    assert (batch["gradient_error"], batch["update_error"], batch["clip_flips"]) == (0, 0, 0)


def test_errors_and_lost_updates_are_those_of_the_dtypes(record):
    mixed, pure, rowwise = (record["choices"][name]["batches"][0] for name in NAMES)
    assert mixed["gradient_error"] < 0.2 < 2 * rowwise["gradient_error"]
    assert pure["unmoved"] > 0.9 > 0.1 > mixed["unmoved"]
    assert mixed["unseen_by_bf16_sampler"] > 0.8


def test_bytes_are_those_of_weights_copies_gradients_and_moments():
    held = {
        name: precision.bytes_per_parameter(precision.spec_of(name)) for name in ("bf16_mixed", "bf16_pure", "float32")
    }
    assert held == {"bf16_mixed": 4 + 2 + 4 + 8, "bf16_pure": 2 + 2 + 4, "float32": 4 + 4 + 8}
    eight = precision.spec_of("bf16_mixed, 8-bit moments")
    assert precision.bytes_per_parameter(eight) == 4 + 2 + 4 + 2 * (1 + 4 / 256)


def test_every_choice_is_in_the_saved_record():
    assert list(load_record()["choices"]) == list(precision.CHOICES)


@pytest.mark.parametrize("name", [name for name in precision.CHOICES if name != "float64"])
def test_tolerances_of_comparisons_cover_the_saved_errors(name):
    """`workbench.diagnose.noise` says that its bars are at least 1.5 times the errors measured here."""
    entry = load_record()["choices"][name]
    bar = Noise.between({"precision": "float64"}, _context(entry["settings"]), 0).gradient
    assert 1.5 * max(batch["gradient_error"] for batch in entry["batches"]) <= bar


def _context(settings):
    changes = settings.get("mixed_precision", {})
    return {"precision": settings["precision"]} | {f"mixed_precision.{name}": value for name, value in changes.items()}


def test_a_reduction_in_bfloat16_and_float32_masters_are_told_apart_in_the_saved_record():
    choices = load_record()["choices"]
    assert median_of(choices["bf16_pure"], "unmoved") > 0.99
    assert median_of(choices["bf16_mixed"], "unmoved") < 0.01
    assert choices["float32"]["bytes_per_parameter"] < choices["bf16_mixed"]["bytes_per_parameter"]


def test_presets_of_the_package_are_all_measured():
    measured = {settings["precision"] for settings in precision.CHOICES.values()}
    assert PRESETS.keys() - measured == {"megatron_bf16"}, "its dtypes are those of bf16_mixed"


def test_the_labs_of_a_gpu_run_without_one(tmp_path):
    """Their model is replaced by a small one; a kernel that needs a GPU is left out with its error."""
    lab = precision.LABS["qwen3_0.6b"]

    def model(folder):
        tiny_qwen3(19, seed=0).save_pretrained(folder)
        return str(folder)

    base = dict(lab.base) | {"device": "cpu", "data": {"micro_batch_tokens": 256}}
    lab = replace(lab, base=base, model=model, batches=precision.random_documents(2, 256, vocabulary=19), steps=1)
    record = precision.measure(lab, names=("bf16_mixed", "bf16_mixed, cudnn attention"), name="qwen3_0.6b")
    [batch] = record["choices"]["bf16_mixed"]["batches"]
    assert 0 < batch["gradient_error"] < 0.1
    assert "cudnn runs on an NVIDIA GPU" in record["choices"]["bf16_mixed, cudnn attention"]["left_out"]


def test_no_choice_is_started_after_the_time():
    lab = replace(precision.LABS["precision"], batches=precision.parts_of_rollouts(documents=4, batches=1), steps=1)
    record = precision.measure(lab, names=("float32",), minutes=0)
    assert record["choices"]["float32"] == {"left_out": "no time: 0 minutes had passed"}
