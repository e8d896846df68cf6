"""The page of the fused head against the plain one: budgets of one step, distances between curves, and text."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.fused_ab import page as fused_ab
from experiments.fused_ab.page import (
    LOSS,
    METRICS,
    MISMATCH,
    NORM,
    REWARD,
    Parting,
    Records,
    answer_of_step,
    answer_of_training,
    furthest,
    holds,
    page,
    partings,
    step_table,
    training,
    training_table,
    write_fused_ab,
)
from tests.unit.report.test_page import Reader
from workbench.atomic import to_json
from workbench.compare.comparison import Comparison, Configuration, ParameterDifference
from workbench.errors import RecordError
from workbench.launch.ablation import load_ablation
from workbench.rollouts.task import named_task
from workbench.specs.run import RunSpec

PROJECT = Path(__file__).parents[3]
FOLDER = PROJECT / "experiments/fused_ab"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PROJECT)}


def settings(**changed):
    return RunSpec().merged(changed).model_dump(mode="json")


def first_step(name, loss, norm, *, precision, fused=False, against="", verdict="reference", distance=0.0, budget=0.0):
    rows = (
        [
            ParameterDifference(0, parameter, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, each, "gradient", True)
            for parameter, each in (("a", 3e-12), ("b", 4e-12))
        ]
        if against
        else []
    )
    whole = [{"step": 0, "distance": distance, "budget": budget}] if against else []
    record = {"step": 0, LOSS: loss, NORM: norm, "advantage/all/std": 0.5, "tokens/trained/sum": 4000.0}
    return Configuration(
        name,
        settings(precision=precision, policy={"fused_loss": fused}),
        against=against,
        verdict=verdict,
        whole_gradient=whole,
        parameters=rows,
        steps=[record],
        run=f"runs/{name}",
    )


def step_one(**fused_float32):
    exact, single = {"precision": "float64"}, {"precision": "float32"}
    return Comparison(
        "step_one",
        "What of <one> step?",
        [
            first_step("plain-float64", 0.25, 1.0, **exact),
            first_step("plain-float32", 0.25 + 2e-7, 1.0 + 1e-6, **single),
            first_step(
                "fused-float64",
                0.25,
                1.0 + 4e-12,
                **exact,
                fused=True,
                against="plain-float64",
                verdict="equal",
                distance=1e-12,
                budget=4e-12,
            ),
            first_step(
                "fused-float32",
                0.25 - 4e-7,
                1.0 - 2e-6,
                **single,
                fused=True,
                against="plain-float32",
                **{"verdict": "within budget", "distance": 3e-6, "budget": 5e-6} | fused_float32,
            ),
        ],
    )


def run(name, rewards, *, fused=False, seed=0, losses=None):
    losses = losses or [0.1] * len(rewards)
    steps = [
        {
            "step": step,
            LOSS: loss,
            NORM: 1.0,
            REWARD: reward,
            "reward/right/fraction": reward / 2,
            MISMATCH: 1e-4,
            "entropy/policy/mean": 0.5,
        }
        for step, (reward, loss) in enumerate(zip(rewards, losses, strict=True))
    ]
    return Configuration(name, settings(steps=len(rewards), seed=seed, policy={"fused_loss": fused}), steps=steps)


def records(**changed):
    fifty = Comparison(
        "fifty_steps",
        "What of fifty?",
        [
            run("run-False-0", [0.2, 0.4, 0.6]),
            run("run-False-1", [0.5, 0.4, 0.9], seed=1),
            run("run-True-0", [0.2, 0.4, 0.9], fused=True, losses=[0.1, 0.1, 0.2]),
            run("run-True-1", [0.5, 0.4, 0.9], fused=True, seed=1),
        ],
    )
    other = Comparison(
        "other_rounding",
        "What of rounding?",
        [run("run-0", [0.2, 0.4, 0.6], losses=[0.1, 0.2, 0.1]), run("run-1", [0.5, 0.7, 0.9], seed=1)],
    )
    sampled = {
        "step_one": {name: {"digests": ["aa"], "alike": [1.0]} for name in ("plain-float64", "fused-float64")},
        "fifty_steps": {
            "run-True-0": {"digests": [], "alike": [1.0, 1.0, 0.25]},
            "run-True-1": {"digests": [], "alike": [1.0, 1.0, 1.0]},
        },
        "other_rounding": {
            "run-0": {"digests": [], "alike": [1.0, 0.5, 0.125]},
            "run-1": {"digests": [], "alike": [1.0, 0.75, 0.5]},
        },
    }
    policy = {
        "parameters": 48.2e6,
        "parameters_beside_embedding": 31.5e6,
        "steps": 400,
        "seconds": 41.0,
        "success_rate": 0.43,
        "sizes": {"hidden_size": 512},
        "provenance": {"gpus": ["a <GPU>"], "cpu": "a CPU"},
    }
    return Records(
        **{"step_one": step_one(), "fifty_steps": fifty, "other_rounding": other, "sampled": sampled, "policy": policy}
        | changed
    )


@pytest.fixture(scope="module")
def text():
    return page(records())


# ---- one step ------------------------------------------------------------------------------------------


def test_a_row_a_run_with_distances_from_the_plain_head_in_float64():
    table = step_table(step_one())
    assert list(table["loss_off"]) == pytest.approx([0.0, 2e-7, 0.0, 4e-7], abs=1e-15)
    assert list(table["norm_off"]) == pytest.approx([0.0, 1e-6, 4e-12, 2e-6], abs=1e-15)
    assert list(table["gradient"]) == [None, None, 0.25, pytest.approx(0.6)]


def test_budgets_are_those_of_verdicts_and_of_the_deviation_of_advantages():
    table = step_table(step_one())
    assert list(table["loss_budget"])[:3] == [None, None, 0.5e-12]
    assert table.loc["fused-float32", "loss_budget"] == pytest.approx(5e-7)  # 2.5 times the plain head's error
    assert list(table["norm_budget"])[::3] == [None, 5e-6]  # of the whole gradient
    assert table.loc["fused-float64", "norm_budget"] == pytest.approx(5e-12, abs=0)  # root of 3^2 + 4^2
    lucky = step_one()
    lucky.configurations[1] = first_step("plain-float32", 0.25, 1.0, precision="float32")
    assert step_table(lucky).loc["fused-float32", "loss_budget"] == 2.5 * 2**-23 * 0.5


@pytest.mark.parametrize(
    ("change", "kept"),
    [({}, True), ({"verdict": "different"}, False), ({"budget": 1e-6}, False), ({"loss": 0.25 - 6e-7}, False)],
)
def test_the_page_reports_a_broken_budget(change, kept):
    made = step_one(**{key: value for key, value in change.items() if key != "loss"})
    if "loss" in change:
        made.configurations[3].steps[0][LOSS] = change["loss"]
    assert holds(made) is kept
    assert ("All budgets hold." in answer_of_step(records(step_one=made))) is kept


def test_runs_with_different_completions_are_reported():
    apart = records().sampled | {"step_one": {"a": {"digests": ["aa"]}, "b": {"digests": ["bb"]}}}
    assert "did not draw the same completions" in answer_of_step(records(sampled=apart))
    assert "did not draw the same completions: nothing below is about the head" in page(records(sampled=apart))
    assert "did not draw" not in answer_of_step(records())


# ---- fifty steps ---------------------------------------------------------------------------------------


def test_distances_between_curves_match_manual_values():
    reward, loss = (training_table(records()).loc[key] for key in (REWARD, LOSS))
    assert reward["first"] == reward["last"] == pytest.approx(0.5)  # three steps are both ends
    assert reward["fused_last"] == pytest.approx(0.55)
    assert reward["fused_plain"] == pytest.approx(math.sqrt(0.3**2 / 6))
    assert reward["rounding"] == pytest.approx(math.sqrt(0.3**2 / 6))
    assert reward["seeds"] == pytest.approx(math.sqrt((0.3**2 + 0.3**2 + 0.3**2) / 6))
    assert loss["fused_plain"] == loss["rounding"] == pytest.approx(math.sqrt(0.1**2 / 6))
    assert list(training_table(records()).index) == list(METRICS)


def test_either_end_is_ten_steps():
    line = [0.5] * 10 + [0.0] * 20 + [1.0] * 10
    both = {seed: {"losses": line} for seed in (0, 1)}
    fifty = Comparison(
        "fifty_steps",
        "?",
        [run(f"run-{fused}-{seed}", line, fused=fused, seed=seed) for fused in (False, True) for seed in both],
    )
    other = Comparison("other_rounding", "?", [run(f"run-{seed}", line, seed=seed) for seed in both])
    result = training_table(records(fifty_steps=fifty, other_rounding=other)).loc[REWARD]
    assert (result["first"], result["last"], result["fused_last"]) == (0.5, 1.0, 1.0)


def test_the_step_of_divergence_is_reported():
    assert partings(records()) == [
        Parting("fused", 0, record=2, answers=2, alike_last=0.25),
        Parting("fused", 1, record=None, answers=None, alike_last=1.0),
        Parting("plain, other rows", 0, record=1, answers=1, alike_last=0.125),
        Parting("plain, other rows", 1, record=None, answers=1, alike_last=0.5),
    ]


def test_runs_of_other_seeds_or_lengths_are_not_compared():
    short = Comparison("other_rounding", "?", [run("run-0", [0.1, 0.2])])
    with pytest.raises(RecordError, match="same seeds, and as many steps"):
        training_table(records(other_rounding=short))


def test_the_figure_draws_a_line_a_run_and_marks_each_distance():
    axes = training(records()).axes
    assert len(axes) == 8
    drawn = sorted([list(line.get_ydata()) for line in axes[0].lines])
    assert drawn == sorted(
        [[0.2, 0.4, 0.6], [0.5, 0.4, 0.9], [0.2, 0.4, 0.9], [0.5, 0.4, 0.9], [0.2, 0.4, 0.6], [0.5, 0.7, 0.9]]
    )
    assert [list(line.get_ydata()) for line in axes[6].lines] == [
        [1.0, 1.0, 0.25],
        [1.0, 1.0, 1.0],
        [1.0, 0.5, 0.125],
        [1.0, 0.75, 0.5],
    ]
    row = training_table(records()).loc[REWARD]
    marks = [line.get_xdata()[0] for line in axes[7].lines if list(line.get_ydata()) == [0]]
    assert marks == [row["rounding"] / row["seeds"], row["fused_plain"] / row["seeds"]]


def test_the_summary_has_the_reward_and_the_three_distances():
    text = answer_of_training(records())
    assert "reward goes from 0.500 to 0.500 with the plain head and to 0.550 with the fused one" in text
    assert "lie 0.12 apart at one seed" in text
    assert "sum in another order 0.12, and two seeds of one head 0.21" in text
    assert "1.0 × 10⁻⁴ nats with the plain and 1.0 × 10⁻⁴ with the fused" in text


def test_the_metric_furthest_beyond_rounding_is_named_with_its_sides():
    assert furthest(records()) == (
        "Furthest beyond rounding lies reward, 1.0 times as far. Its fused − plain, mean "
        "over steps, is 0.10 and 0 at the 2 seeds."
    )
    made = records()
    same = replace(
        made.other_rounding,
        configurations=[c for c in made.fifty_steps.configurations if not c.settings["policy"]["fused_loss"]],
    )
    assert furthest(replace(made, other_rounding=same)) == "Rounding moved nothing."


# ---- the page ------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_offline(text):
    read = Reader(text)
    assert read.crossed == []
    assert read.open == []
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert {"h1", "figure", "svg", "table"} <= {tag for tag, _ in read.tags}
    assert read.text.count("k3 on the sampler's tokens") == 1
    assert "48.2 million parameters, 31.5 million of them outside its embedding (hidden_size 512)" in read.text
    assert "41 s on a <GPU>, until 43%" in read.text
    assert "Each step samples 16 prompts with 8 completions at temperature 1, the sampler in float32" in read.text


def test_it_is_written_from_a_folder_in_the_same_bytes_and_a_failed_run_is_named(text, tmp_path):
    made = records()
    for name in fused_ab.ABLATIONS:
        (tmp_path / name).mkdir()
        getattr(made, name).save(tmp_path / name / "comparison.json")
        (tmp_path / name / "sampled.json").write_bytes(to_json(made.sampled[name]))
    with pytest.raises(RecordError, match=r"warm_up\.json"):
        write_fused_ab(tmp_path)
    (tmp_path / "warm_up.json").write_bytes(to_json(made.policy))
    assert write_fused_ab(tmp_path).read_text() == text
    broken = replace(made.step_one.configurations[0], state="failed", why="out of memory")
    with pytest.raises(RecordError, match="out of memory"):
        page(replace(made, step_one=replace(made.step_one, configurations=[broken])))


# ---- the experiment ------------------------------------------------------------------------------------


def test_the_ablation_files_record_everything_that_the_page_reads():
    one, fifty, other = (load_ablation(FOLDER / f"{name}.yaml").expand() for name in fused_ab.ABLATIONS)
    assert {run.spec.precision for run in one} == {"float64", "float32"}
    assert all(run.spec.record.gradients == "full" and run.spec.record.metrics == "full" for run in one)
    assert {(run.spec.policy.fused_loss, run.spec.policy.logprobs) for run in [*one, *fifty]} == {
        (False, "reference"),
        (True, "auto"),
    }
    assert {(run.spec.policy.fused_loss, run.spec.seed) for run in fifty} == {
        (False, 0),
        (False, 1),
        (True, 0),
        (True, 1),
    }
    plain = {run.spec.seed: run.spec for run in fifty if not run.spec.policy.fused_loss}
    rows = {run.spec.seed: run.spec for run in other}
    assert plain.keys() == rows.keys()
    for seed, spec in rows.items():
        assert spec.merged({"data": {"micro_batches": plain[seed].data.micro_batches}}) == plain[seed]
    step = {"record": one[0].spec.record.model_dump(), "steps": 1, "precision": "float32", "seed": 0}
    assert plain[0].merged(step) in [run.spec for run in one]


def test_an_id_that_is_no_symbol_is_read_and_never_right():
    task = named_task("experiments/fused_ab/task.py:WideArithmetic", PROJECT)
    right = task.encode("12-2=10$")
    assert task.decode([*right[:-1], 32767, right[-1]]) == "12-2=10_$"
    assert task.reward("^5+7-2=", task.decode(right)) == task.right_reward
    assert task.reward("^5+7-2=", task.decode([*right[:-1], 19, right[-1]])) == 0.0


@pytest.mark.slow
def test_the_experiment_runs_from_end_to_end_with_a_tiny_policy(tmp_path):
    warm_up = [sys.executable, FOLDER / "warm_up.py", tmp_path, "--tiny"]
    subprocess.run(warm_up, cwd=PROJECT, check=True, capture_output=True, env=ENVIRONMENT)
    script = [sys.executable, FOLDER / "report.py", "--dry-run", tmp_path]
    for part in ("--measure", "--page"):
        subprocess.run([*script, part], cwd=PROJECT, check=True, capture_output=True, env=ENVIRONMENT)
    assert holds(Records.load(tmp_path).step_one)
    assert (tmp_path / "policy/config.json").is_file()
    assert "All runs drew the same completions" in (tmp_path / "report.html").read_text()
