"""The page of ratios before the first step: numbers by temperature and head, identical samples, and text."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.ratio_at_step_zero.page import (
    ABLATIONS,
    DISTANCES,
    HEADS,
    KL,
    OUTSIDE,
    SAMPLES,
    Records,
    answer,
    beyond,
    page,
    ratios,
    write_ratio_at_step_zero,
)
from tests.unit.report.test_page import Reader
from workbench.atomic import to_json
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.launch.ablation import load_ablation
from workbench.specs.run import RunSpec

PROJECT = Path(__file__).parents[3]
FOLDER = PROJECT / "experiments/ratio_at_step_zero"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PROJECT)}
ONLINE = {"task": "arithmetic", "temperature": 0.7, "old_logprobs": "sampler"}


def run(
    name,
    *,
    sampler="bfloat16",
    trainer="bfloat16",
    logprobs="reference",
    lifted=False,
    temperature=0.7,
    outside=0.0,
    device="cuda",
):
    policy = {"logprobs": logprobs, "fp32_head": lifted, "temperature": temperature}
    settings = RunSpec(
        precision=trainer,
        policy=policy,
        online=ONLINE | {"sampler_precision": sampler},
        data={"advantages": {"name": "grpo"}},
        loss={"name": "grpo"},
    ).model_dump(mode="json")
    return Configuration(name, settings, device=device, steps=[{"step": 0, OUTSIDE: outside, KL: 1e-6, SAMPLES: 400.0}])


def spread(mean_distance, *, answers="aa"):
    return {
        "answers": answers,
        "tokens": 500,
        "mean": -mean_distance,
        "mean_distance": mean_distance,
        "most": 10 * mean_distance,
        "shares_beyond": [1.0 if distance < mean_distance else 0.0 for distance in DISTANCES],
    }


def records(**answers):
    runs = {
        "bfloat16": [run("a"), run("b", lifted=True), run("c", temperature=1.0, outside=0.25)],
        "float32_trainer": [run("d", trainer="float32", logprobs="auto")],
        "float32_sampler": [run("e", sampler="float32"), run("f", sampler="float32", lifted=True)],
    }
    means = {"a": 1e-4, "b": 2e-3, "c": 0.03, "d": 3e-3, "e": 4e-3, "f": 5e-4}
    return Records(
        {name: Comparison(name, "What of <it>?", result) for name, result in runs.items()},
        {
            name: {c.name: spread(means[c.name], answers=answers.get(c.name, "aa")) for c in result}
            for name, result in runs.items()
        },
    )


@pytest.fixture(scope="module")
def text():
    return page(records())


def test_each_run_has_a_row_from_its_record_and_metrics():
    result = ratios(records())
    assert list(result["head"]) == [
        "bfloat16 logits",
        "float32 head",
        "bfloat16 logits",
        "float32",
        "bfloat16 logits",
        "float32 head",
    ]
    assert list(result["mean_distance"]) == [1e-4, 2e-3, 0.03, 3e-3, 4e-3, 5e-4]
    assert list(result["temperature"]) == [0.7, 0.7, 1.0, 0.7, 0.7, 0.7]
    assert list(result["outside"]) == [0.0, 0.0, 0.25, 0.0, 0.0, 0.0]
    assert list(result["samples"]) == [0.8] * 6
    assert list(result["sampler"]) == ["bfloat16"] * 4 + ["float32"] * 2


@pytest.mark.parametrize(("device", "head"), [("cuda", "float32 logits"), ("cpu", "bfloat16 logits")])
def test_auto_is_another_head_on_a_gpu(device, head):
    made = records()
    made.comparisons["bfloat16"].configurations[0] = run("a", logprobs="auto", device=device)
    assert ratios(made).loc[("bfloat16", "a"), "head"] == head


def test_a_temperature_left_out_is_the_samplers():
    made = records()
    made.comparisons["bfloat16"].configurations[0] = run("a", temperature=None)
    assert ratios(made).loc[("bfloat16", "a"), "temperature"] == 0.7


def test_the_summary_consists_of_numbers():
    text = answer(records())
    assert "starts with log ratios 1.0 × 10⁻⁴ nats from 0 in the mean and 0.0010 at most, 0 % of tokens" in text
    assert "without it, at 1, with 0.030 and 0.30, and 25 % outside" in text
    assert "float32 head in the trainer alone makes the first 0.0020, and a trainer wholly in float32 0.0030" in text
    assert "it is 0.0040 with bfloat16 logits and 5.0 × 10⁻⁴ with a float32 head" in text


def test_the_figure_draws_the_share_of_tokens_beyond_each_distance():
    by_temperature, by_head = beyond(records()).axes
    assert [line.get_label() for line in by_temperature.lines][:3] == [
        "bfloat16 logits, T = 0.7",
        "bfloat16 logits, T = 1",
        "float32 trainer, T = 0.7",
    ]
    assert len([line for line in by_head.lines if "T = 0.7" in str(line.get_label())]) == 5
    first = [value for value in by_temperature.lines[0].get_ydata() if not math.isnan(value)]
    assert first == [1.0] * sum(distance < 1e-4 for distance in DISTANCES)
    for axes in (by_temperature, by_head):
        assert axes.lines[-1].get_xdata()[0] == pytest.approx(math.log(1.2))  # nearer than log 0.8
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_the_page_lists_runs_with_identical_samples(text):
    assert "All runs with a bfloat16 sampler drew the same completions, 500 trained tokens." in text
    assert "All runs with a float32 sampler drew the same completions" in text
    assert "The runs with a bfloat16 sampler did not draw the same completions." in page(records(c="bb"))


def test_the_page_is_whole_and_offline(text):
    read = Reader(text)
    assert read.crossed == []
    assert read.open == []
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert {"h1", "figure", "svg", "table"} <= {tag for tag, _ in read.tags}
    assert read.text.count("k3 on the sampler's tokens") == 1
    assert "What helps is the same arithmetic on both sides, trunk and head." in read.text


def test_it_is_written_from_a_folder_in_the_same_bytes_and_a_failed_run_is_named(text, tmp_path):
    made = records()
    for name in ABLATIONS:
        (tmp_path / name).mkdir()
        made.comparisons[name].save(tmp_path / name / "comparison.json")
    with pytest.raises(RecordError, match=r"log_ratios\.json"):
        write_ratio_at_step_zero(tmp_path)
    for name in ABLATIONS:
        (tmp_path / name / "log_ratios.json").write_bytes(to_json(made.log_ratios[name]))
    assert write_ratio_at_step_zero(tmp_path).read_text() == text
    broken = made.comparisons["bfloat16"].configurations
    broken[0] = replace(broken[0], state="failed", why="out of memory")
    with pytest.raises(RecordError, match="a: out of memory"):
        page(made)


def test_the_ablation_files_record_everything_that_the_page_reads():
    for name in ABLATIONS:
        for plan in load_ablation(FOLDER / f"{name}.yaml").expand():
            spec = plan.spec
            assert spec.record.tokens, plan.name
            assert (spec.online.old_logprobs, spec.online.temperature, spec.steps) == ("sampler", 0.7, 1)
            if spec.precision == "bfloat16":
                assert (spec.policy.logprobs, spec.policy.fp32_head) in HEADS


@pytest.mark.slow
def test_the_experiment_runs_from_end_to_end_with_a_tiny_policy(tmp_path):
    script = [sys.executable, FOLDER / "report.py", "--dry-run", tmp_path]
    for part in ("--measure", "--page"):
        subprocess.run([*script, part], cwd=PROJECT, check=True, capture_output=True, env=ENVIRONMENT)
    assert "All runs with a bfloat16 sampler drew the same completions" in (tmp_path / "report.html").read_text()
