"""Samples of online runs, from their folders: real runs of a tiny policy, small enough to be counted."""

import pytest
import torch

from experiments.sampled import (
    completions_of,
    digest,
    log_ratios,
    read_record,
    run_of,
    share_alike,
    shares_beyond,
    succeeded,
)
from workbench.compare.comparison import Comparison, Configuration
from workbench.errors import RecordError
from workbench.launch.ablation import AblationSpec
from workbench.launch.run import launch
from workbench.rollouts.task import ArithmeticTask
from workbench.specs.run import RunSpec


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Two runs of two steps: one trains on the sampler's log-probabilities, the other at a temperature of its own."""
    folder = tmp_path_factory.mktemp("experiment")
    ablation = AblationSpec(
        reference="run",
        configurations={"run": {}},
        axes={"policy.temperature": [1.0, 2.0]},
        base={
            "steps": 2,
            "model": {"source": "tiny-qwen3"},
            "data": {"advantages": {"name": "grpo"}},
            "online": {
                "task": "arithmetic",
                "prompts": 2,
                "answers": 2,
                "max_new_tokens": 4,
                "old_logprobs": "sampler",
            },
            "record": {"gradients": "none"},
            "device": "cpu",
        },
    )
    sweep = launch(ablation, folder, where="here")
    return folder, [
        Configuration(plan.name, plan.spec.model_dump(mode="json"), run=f"runs/{run.path.name}", steps=run.steps())
        for plan, run in zip(sweep.planned, sweep.runs, strict=True)
    ]


def test_completions_have_the_prompt_and_completion_of_each_document(experiment):
    folder, [one, _] = experiment
    run, task = run_of(folder, one), ArithmeticTask()
    answers = completions_of(run, 1)
    assert len(answers) == 4
    texts = [task.decode(answer) for answer in answers]
    assert [text[: text.index("=") + 1] for text in texts[::2]] == [text[: text.index("=") + 1] for text in texts[1::2]]
    assert sum(map(len, answers)) - sum(text.index("=") + 1 for text in texts) == one.steps[1]["tokens/trained/sum"]
    assert completions_of(run, 0) != answers


def test_both_runs_drew_the_same_in_the_first_step(experiment):
    folder, runs = experiment
    first, second = (completions_of(run_of(folder, c), 0) for c in runs)
    assert digest(first) == digest(second)
    assert share_alike(first, second) == 1.0
    assert share_alike(first, [*second[:3], second[3][:-1]]) == 0.75
    assert digest([*second[:3], second[3][:-1]]) != digest(first)


def test_log_ratios_are_of_trained_tokens_against_the_sampler(experiment):
    folder, runs = experiment
    same, other = (log_ratios(run_of(folder, c)) for c in runs)
    assert len(same) == len(other) == runs[0].steps[0]["tokens/trained/sum"]
    assert same.abs().max() < 1e-5 < 0.01 < other.abs().mean()
    assert float(other.exp().mean()) == pytest.approx(runs[1].steps[0]["ratio/policy_old/mean"], rel=1e-5)


def test_shares_beyond_a_bound():
    assert shares_beyond(torch.tensor([0.0, 0.1, 0.2, 0.2]), [-1.0, 0.0, 0.1, 0.3]) == [1.0, 0.75, 0.5, 0.0]


def test_a_run_that_is_gone_or_failed_is_named(experiment, tmp_path):
    _, [one, _] = experiment
    with pytest.raises(RecordError, match=r"what run-1\.0 sampled\n  found: no run directory"):
        run_of(tmp_path, one)
    failed = Configuration("run", RunSpec().model_dump(mode="json"), state="failed", why="out of memory")
    with pytest.raises(RecordError, match="report experiment\n  found: run: out of memory"):
        succeeded(Comparison("experiment", "?", [one, failed]))
    assert succeeded(Comparison("experiment", "?", [one])) == [one]


def test_a_record_that_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"read sampled\.json\n  found: FileNotFoundError"):
        read_record(tmp_path / "sampled.json")
    (tmp_path / "sampled.json").write_text("{")
    with pytest.raises(RecordError, match="measure again"):
        read_record(tmp_path / "sampled.json")
    (tmp_path / "sampled.json").write_text('{"a": 1}')
    assert read_record(tmp_path / "sampled.json") == {"a": 1}
