"""Preemption by a real Slurm: a checkpoint within the time of grace, a requeue, and the bits of an undisturbed run."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import until
from tests.slurm.test_states import START_S, handle, measured
from workbench.launch.ablation import PlannedRun
from workbench.launch.run import launch
from workbench.records.provenance import project_root
from workbench.records.requeued import REQUEUED, STOPPED_AFTER
from workbench.specs.run import RunSpec

pytestmark = pytest.mark.slurm

STEPS = 60


def started(folder, where="slurm", steps=STEPS, **options):
    spec = RunSpec.model_validate(
        {
            "steps": steps,
            "device": "cpu",
            "precision": "float64",
            "model": {"source": "tiny-qwen3"},
            "record": {"checkpoint_every": 1000, "certificate": True},
        }
    )
    options = {"memory_mb": "50", **options} if where == "slurm" else None
    return launch([PlannedRun("a", spec, "", "", "a")], folder, where=where, project=project_root(), options=options)


@pytest.mark.parametrize("within_grace", [True, False], ids=["GraceTime", "no GraceTime"])
def test_a_preempted_run_is_requeued_and_resumes_with_the_same_bits(slurm, tmp_path, within_grace):
    slurm.command("scontrol", "update", "PartitionName=low", f"GraceTime={20 if within_grace else 0}")
    sweep = started(tmp_path / "preempted", partition="low")
    [run] = sweep
    try:
        until(lambda: len(run.steps()) >= 3, START_S)
        number = handle(run)
        slurm.command("sbatch", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
        until(lambda: STOPPED_AFTER in run.state or REQUEUED in run.state, 60)
        until(lambda: slurm.job(number)["JobState"] == "PENDING", 120)
        assert slurm.job(number)["Restarts"] == "1"
        [stopped] = run.checkpoints()
        assert len(run.steps()) == stopped
        until(lambda: not slurm.command("squeue", "--noheader", "--states=COMPLETING").strip(), 60)
        slurm.command("scontrol", "update", f"job={number}", "StartTime=now")  # Slurm lets it wait for two minutes
        sweep.wait(400)
    finally:
        sweep.cancel()
        sweep.wait(60)
        slurm.command("scontrol", "update", "PartitionName=low", "GraceTime=20")
    measured(f"stopped after {stopped} of {STEPS} steps; {run.state['scheduler']}")
    assert (run.state["state"], len(run.state[REQUEUED])) == ("succeeded", 1)
    [other] = started(tmp_path / "whole", where="processes").wait(400)
    assert [record["certificate"] for record in run.steps()] == [record["certificate"] for record in other.steps()]


def test_a_time_limit_keeps_a_checkpoint(slurm, tmp_path):
    sweep = started(tmp_path / "limited", steps=10**6, time="1")
    [run] = sweep.wait(300)
    assert run.failure()["cause"] == "scheduler"
    assert "TIMEOUT" in run.failure()["message"]
    [stopped] = run.checkpoints()
    assert run.state[STOPPED_AFTER]["step"] == stopped == len(run.steps())
