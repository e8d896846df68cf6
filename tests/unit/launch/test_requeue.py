"""The agent's side of a requeue: jobs that Slurm started again, its first node, runs that stopped with a checkpoint."""

from __future__ import annotations

import pytest

from workbench.errors import LaunchError
from workbench.launch import requeue
from workbench.records.directory import RunDirectory
from workbench.records.requeued import REQUEUED, STOPPED_AFTER
from workbench.specs.run import RunSpec


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_NODEID", "WB_GRACE_S"):
        monkeypatch.delenv(name, raising=False)
    run = RunDirectory.create(tmp_path, "run", RunSpec())
    run.set_state("running")
    return run


@pytest.fixture
def requested(monkeypatch):
    numbers = []
    monkeypatch.setattr(requeue.slurm, "requeue_if_preempted", numbers.append)
    return numbers


@pytest.mark.parametrize(("count", "node", "reopened"), [("1", "0", 1), ("0", "0", 0), (None, "0", 0), ("1", "1", 0)])
def test_runs_are_reopened_once_by_the_first_node_of_a_restarted_job(run, monkeypatch, count, node, reopened):
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    monkeypatch.setenv("SLURM_NODEID", node)
    requeue.reopen_runs([run.path])
    assert len(run.state.get(REQUEUED, ())) == reopened


@pytest.mark.parametrize("because", ["", "no job", "second node", "no checkpoint", "cancelled"])
def test_a_requeue_is_requested_for_a_run_that_stopped_with_a_checkpoint(run, monkeypatch, requested, because):
    if because != "no job":
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    if because == "second node":
        monkeypatch.setenv("SLURM_NODEID", "1")
    if because != "no checkpoint":
        run.note(**{STOPPED_AFTER: {"step": 1}})
    if because == "cancelled":
        run.request_cancel("a test")
    requeue.request([run.path])
    assert requested == ([] if because else ["7"])


def test_a_controller_that_refuses_does_not_hide_how_the_job_ended(run, monkeypatch, capsys):
    def refuse(job_id):
        raise LaunchError(f"requeue job {job_id}", found="no", rule="yes", fix="none")

    monkeypatch.setattr(requeue.slurm, "requeue_if_preempted", refuse)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run.note(**{STOPPED_AFTER: {"step": 1}})
    requeue.request([run.path])
    assert "not requeued: requeue job 7" in capsys.readouterr().err


@pytest.mark.parametrize(("grace", "seconds"), [(None, 30), ("100.5", 106)])
def test_torchs_agent_waits_longer_than_the_ranks(run, monkeypatch, grace, seconds):
    if grace is not None:
        monkeypatch.setenv("WB_GRACE_S", grace)
    assert requeue.shutdown_timeout_s() == seconds
