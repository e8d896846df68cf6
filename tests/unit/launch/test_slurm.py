"""Descriptions of jobs, as Slurm 22.05 prints them; a real Slurm is asked in tests/slurm."""

from __future__ import annotations

import subprocess

import pytest

from tests.helpers.stand_in import stand_in
from workbench.errors import LaunchError
from workbench.launch import slurm
from workbench.launch.slurm import SlurmJob

PENDING = (
    "JobId=3 JobName=cp2-0 UserId=root(0) QOS=(null) JobState=PENDING Reason=Resources Dependency=(null) Restarts=0 "
    "ExitCode=0:0 RunTime=00:00:00 TimeLimit=UNLIMITED TimeMin=N/A NodeList= NumNodes=2-2 Command=(null)\n"
)
RUNNING = PENDING.replace("PENDING Reason=Resources", "RUNNING Reason=None").replace("NodeList=", "NodeList=node2")
FORGOTTEN = "slurm_load_jobs error: Invalid job id specified\n"
SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
DISABLED = "Slurm accounting storage is disabled\n"


@pytest.fixture
def answers(monkeypatch):
    """Command -> its output, or a message that it fails with; the commands that were run are under "run"."""
    given = {"run": []}

    def run(command, **options):
        given["run"].append(command)
        if isinstance(answer := given[command[0]], Exception):
            raise answer
        failed = "error" in answer or answer == DISABLED
        return subprocess.CompletedProcess(command, int(failed), "" if failed else answer, answer if failed else "")

    monkeypatch.setattr(slurm, "subprocess", stand_in(subprocess, run=run))
    return given


@pytest.mark.parametrize(
    ("fields", "ended", "by_scheduler", "text"),
    [
        ({"JobState": "PENDING", "Reason": "Resources"}, None, False, "PENDING (Resources)"),
        (
            {"JobState": "PENDING", "Reason": "ReqNodeNotAvail,_UnavailableNodes:node2"},
            None,
            False,
            "PENDING (ReqNodeNotAvail, UnavailableNodes:node2)",
        ),
        ({"JobState": "RUNNING", "NodeList": "node2"}, None, False, "RUNNING (node2)"),
        ({"JobState": "COMPLETING", "Reason": "None"}, None, False, "COMPLETING"),
        ({"JobState": "COMPLETED", "ExitCode": "0:0"}, "succeeded", False, "COMPLETED"),
        (
            {"JobState": "FAILED", "Reason": "NonZeroExitCode", "ExitCode": "3:0"},
            "failed",
            False,
            "FAILED (NonZeroExitCode, exit code 3:0)",
        ),
        ({"JobState": "CANCELLED by 1000"}, "cancelled", False, "CANCELLED"),
        (
            {"JobState": "TIMEOUT", "Reason": "TimeLimit", "RunTime": "00:01:05", "TimeLimit": "00:01:00"},
            "failed",
            True,
            "TIMEOUT (ran 00:01:05, limit 00:01:00)",
        ),
        (
            {"JobState": "NODE_FAIL", "Reason": "NodeDown", "NodeList": "node1"},
            "failed",
            True,
            "NODE_FAIL (NodeDown, node1)",
        ),
        ({"JobState": "PREEMPTED", "Reason": "Preempted"}, "failed", True, "PREEMPTED"),
        (
            {"JobState": "FAILED", "Reason": "NonZeroExitCode", "PreemptTime": "2026-11-24T00:09:50"},
            "failed",
            True,
            "PREEMPTED",
        ),
        ({"JobState": "FAILED", "ExitCode": "1:0", "PreemptTime": "None"}, "failed", False, "FAILED (exit code 1:0)"),
        ({"JobState": "OUT_OF_MEMORY"}, "failed", True, "OUT_OF_MEMORY"),
        ({"JobState": "A_STATE_OF_TOMORROW"}, None, False, "A_STATE_OF_TOMORROW"),
    ],
)
def test_states(fields, ended, by_scheduler, text):
    job = SlurmJob.of_fields(fields)
    assert (job.ended, job.ended_by_scheduler, str(job)) == (ended, by_scheduler, text)


def test_the_controller_is_asked_first(answers):
    answers["scontrol"] = RUNNING
    job = slurm.ask("3")
    assert (job.state, job.nodes, job.limit) == ("RUNNING", "node2", "UNLIMITED")
    assert answers["run"] == [("scontrol", "--oneliner", "show", "job", "3")]


def test_what_the_controller_forgot_the_accounting_remembers(answers):
    answers |= {"scontrol": FORGOTTEN, "sacct": "TIMEOUT|None|0:0|00:02:05|00:02:00|node1\n"}
    assert str(slurm.ask("3")) == "TIMEOUT (ran 00:02:05, limit 00:02:00)"


@pytest.mark.parametrize("accounting", [DISABLED, "", FileNotFoundError("sacct")])
def test_a_job_that_neither_knows_is_unknown(answers, accounting):
    answers |= {"scontrol": FORGOTTEN, "sacct": accounting}
    assert slurm.ask("3") is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (SILENT, "Unable to contact slurm controller"),
        (FileNotFoundError(2, "no", "scontrol"), "no scontrol on this machine"),
        (subprocess.TimeoutExpired("scontrol", 30), "timed out after 30 seconds"),
    ],
)
def test_a_controller_that_does_not_answer_is_an_error(answers, answer, message):
    answers["scontrol"] = answer
    with pytest.raises(LaunchError, match=message):
        slurm.ask("3")


def test_a_job_is_cancelled_by_its_number(answers):
    answers["scancel"] = ""
    slurm.cancel("3")
    assert answers["run"] == [("scancel", "3")]
    answers["scancel"] = "scancel: error: Kill job error on job id 3: Invalid job id specified"
    slurm.cancel("3")
    answers["scancel"] = "scancel: error: Kill job error on job id 3: Access/permission denied"
    with pytest.raises(LaunchError, match="permission denied"):
        slurm.cancel("3")


PREEMPTED = RUNNING.replace("Restarts=0", "Restarts=0 Requeue=1 PreemptTime=2026-11-24T00:09:50")


@pytest.mark.parametrize(
    ("fields", "requeued"),
    [
        (PREEMPTED, True),
        (PREEMPTED.replace("Requeue=1", "Requeue=0"), False),
        (PREEMPTED.replace("PreemptTime=2026-11-24T00:09:50", "PreemptTime=None"), False),
        (PREEMPTED.replace("JobState=RUNNING", "JobState=CANCELLED"), False),
        (FORGOTTEN, False),
    ],
)
def test_only_a_running_job_that_is_preempted_is_requeued(answers, fields, requeued):
    answers["scontrol"] = fields
    slurm.requeue_if_preempted("3")
    assert answers["run"][1:] == ([("scontrol", "requeue", "3")] if requeued else [])
