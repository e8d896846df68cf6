"""Runs that share a torchx job have the bits, files and failures of runs with jobs of their own."""

from __future__ import annotations

import json
import re

import pytest
import torch

from workbench.launch.ablation import PlannedRun
from workbench.launch.run import launch
from workbench.specs.run import RunSpec

SETTINGS = {
    "plain": {"layout": {"cp": 2, "order": "zigzag"}, "optimizer": {"name": "adamw", "learning_rate": 1e-3}},
    "sharded": {"layout": {"dp": 2, "shard_parameters": True}},
    "faulty": {"layout": {"cp": 2}, "faults": ["missing_cp_factor"]},
    "exact": {"layout": {"tp": 2}, "reproducible": {"block_tokens": 128, "weight_chunks": 2}, "precision": "float32"},
    "again": {"layout": {"cp": 2, "order": "zigzag"}, "optimizer": {"name": "adamw", "learning_rate": 1e-3}},
}
FAKE = "tests.helpers.fake_worker"
TIMES = ("time/", "memory/")


def sweep_of(folder, configurations, **options):
    base = {"steps": 2, "precision": "float64", "record": {"gradients": "full", "tokens": True}}
    planned = [
        PlannedRun(name, RunSpec.model_validate(base | settings), "", "", name)
        for name, settings in configurations.items()
    ]
    return launch(planned, folder, **options).wait()


def content(run):
    """Everything that a run computed: step records without times, and all tensors."""
    records = [{k: v for k, v in step.items() if not k.startswith(TIMES)} for step in run.steps()]
    names = sorted(path.stem for path in (run.path / "tensors").glob("*.safetensors"))
    return json.dumps(records, sort_keys=True), {name: run.read_tensors(name) for name in names}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return sweep_of(tmp_path_factory.mktemp("shared"), SETTINGS)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_bits_are_those_of_a_job_of_its_own(shared, name, tmp_path):
    assert set(shared.states().values()) == {"succeeded"}
    run = next(run for run in shared if run.name == f"{name}")
    [alone] = sweep_of(tmp_path, {name: SETTINGS[name]}, where="processes")
    (records, tensors), (expected_records, expected) = content(run), content(alone)
    assert records == expected_records
    assert tensors.keys() == expected.keys()
    assert len(tensors) == 4
    for file, values in tensors.items():
        assert values.keys() == expected[file].keys()
        assert all(torch.equal(value, expected[file][key]) for key, value in values.items())


def test_each_run_has_its_own_files_and_one_job_served_all(shared):
    states = [run.state for run in shared]
    assert len({state["handle"] for state in states}) == 1
    assert [state.get("job_of") for state in states] == [None] + [shared.runs[0].path.name] * 4
    for run in shared:
        assert {path.suffix for path in (run.path / "ranks").iterdir()} >= {".log", ".flight", ".stack", ".json"}
        assert run.exits().keys() == {0, 1}
        assert (run.path / "provenance.json").exists()
    assert len({state["rank0"]["pid"] for state in states}) == 1


def test_after_a_crash_the_remaining_runs_are_started_again(tmp_path):
    good = {"layout": {"cp": 2}}
    sweep = sweep_of(
        tmp_path, {"first": good, "broken": good | {"faults": ["raise_on_1"]}, "last": good}, worker=FAKE, per_job=3
    )
    assert sweep.states() == {"first": "succeeded", "broken": "failed", "last": "succeeded"}
    failure = sweep.runs[1].failure()
    assert (failure["rank"], failure["cause"]) == (1, "exception")
    assert re.search("the second rank had enough", failure["message"])
    assert sweep.runs[0].state["handle"] == sweep.runs[1].state["handle"] != sweep.runs[2].state["handle"]
