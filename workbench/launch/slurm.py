"""Jobs of Slurm: the state of one, why it waits, what ended it.

Slurm's controller knows a job from its submission until some minutes after its end (``MinJobAge``), on every cluster:
`scontrol` asks it. `sacct` asks the accounting, which remembers longer, where a cluster has one. torchx 0.7 asks
`sacct` alone, and so never learns on a cluster without accounting that a job has ended.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.errors import LaunchError

COMMAND_S = 30.0
"""Time that a command of Slurm has to answer; its own time-outs are shorter."""

_ENDED = {"COMPLETED": "succeeded", "CANCELLED": "cancelled"}
_BY_SCHEDULER = ("BOOT_FAIL", "DEADLINE", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT")
_FAILED = ("FAILED", "LAUNCH_FAILED", "RECONFIG_FAIL", *_BY_SCHEDULER)
_NOTHING = ("", "None", "(null)", "N/A", "Unknown", "None assigned")


@dataclass(frozen=True)
class SlurmJob:
    """A job as Slurm describes it, in Slurm's words.

    Attributes:
        state: such as PENDING, RUNNING, TIMEOUT.
        reason: why it waits or why it ended, such as Resources; "" if there is none.
        exit_code: exit code and signal, such as 3:0.
        elapsed: time that it ran, such as 00:01:05; a requeued job's since its last start.
        limit: its time limit; "" if unknown.
        nodes: its nodes; "" before they are chosen.

    Example:
        >>> job = SlurmJob.of_fields({"JobState": "PENDING", "Reason": "Resources"})
        >>> job.ended, str(job)
        (None, 'PENDING (Resources)')
    """

    state: str
    reason: str = ""
    exit_code: str = ""
    elapsed: str = ""
    limit: str = ""
    nodes: str = ""

    @classmethod
    def of_fields(cls, fields: Mapping[str, str]) -> SlurmJob:
        """Read a job from the fields of `scontrol show job`."""
        state, reason, *rest = (
            "" if fields.get(name, "") in _NOTHING else fields[name]
            for name in ("JobState", "Reason", "ExitCode", "RunTime", "TimeLimit", "NodeList")
        )
        state = state.partition(" ")[0].rstrip("+")
        if state == "FAILED" and fields.get("PreemptTime", "") not in _NOTHING:
            state, reason = "PREEMPTED", ""  # its processes ended on SIGTERM, in their time of grace
        return cls(state, reason.replace("_", " "), *rest)

    @property
    def ended(self) -> str | None:
        """The end of the job: succeeded, failed or cancelled; None before."""
        return "failed" if self.state in _FAILED else _ENDED.get(self.state)

    @property
    def ended_by_scheduler(self) -> bool:
        """True if Slurm ended the job, and not its own exit or a user."""
        return self.state in _BY_SCHEDULER

    def __str__(self) -> str:
        """State and what explains it, in a line."""
        facts = [self.reason] if self.state != "RUNNING" and self.reason != self.state.capitalize() else []
        if self.state == "TIMEOUT":
            facts = [f"ran {self.elapsed}, limit {self.limit}"]
        if self.state in ("RUNNING", "NODE_FAIL"):
            facts += [self.nodes]
        if self.state == "FAILED":
            facts += [f"exit code {self.exit_code}"]
        explained = ", ".join(filter(None, facts))
        return f"{self.state} ({explained})" if explained else self.state


def ask(job_id: str) -> SlurmJob | None:
    """Return the job as the controller knows it, or else as the accounting remembers it; None if neither does.

    Raises:
        LaunchError: the controller does not answer, so that nothing is known.
    """
    fields = _fields(job_id)
    return SlurmJob.of_fields(fields) if fields else _remembered(job_id)


def _fields(job_id: str) -> dict[str, str]:
    """The fields of a job that the controller knows; {} if it does not know the job."""
    done = _run("scontrol", "--oneliner", "show", "job", job_id)
    if done.returncode == 0 and "JobState=" in done.stdout:
        return dict(re.findall(r"(\w+)=(\S*)", done.stdout.splitlines()[0]))
    if "Invalid job id" not in done.stderr:
        raise _error(f"ask Slurm for job {job_id}", done)
    return {}


def requeue_if_preempted(job_id: str) -> None:
    """Put a job that is being preempted back in the queue, if it was submitted so; nothing otherwise.

    Slurm requeues a preempted job when its time of grace is over. One that ends within it counts as failed.

    Raises:
        LaunchError: Slurm did not take the request.
    """
    job = _fields(job_id)
    if job.get("JobState") == "RUNNING" and job.get("Requeue") == "1" and job.get("PreemptTime", "") not in _NOTHING:
        done = _run("scontrol", "requeue", job_id)
        if done.returncode:
            raise _error(f"requeue job {job_id}", done)


def cancel(job_id: str) -> None:
    """Request the end of a job; nothing if it has ended.

    Raises:
        LaunchError: Slurm did not take the request.
    """
    done = _run("scancel", job_id)
    if done.returncode and "Invalid job id" not in done.stderr:
        raise _error(f"cancel job {job_id}", done)


def _remembered(job_id: str) -> SlurmJob | None:
    names = {
        "State": "JobState",
        "Reason": "Reason",
        "ExitCode": "ExitCode",
        "Elapsed": "RunTime",
        "Timelimit": "TimeLimit",
        "NodeList": "NodeList",
    }
    try:
        done = _run("sacct", "--noheader", "--parsable2", "--allocations", "-j", job_id, f"--format={','.join(names)}")
    except LaunchError:
        return None  # a cluster without accounting may lack the command
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return SlurmJob.of_fields(dict(zip(names.values(), lines[-1].split("|"), strict=True))) if lines else None


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"run {command[0]}",
            found=f"no {command[0]} on this machine" if isinstance(error, FileNotFoundError) else str(error),
            rule="Slurm's commands answer on the machine that launches",
            fix="launch where the cluster's own commands work",
        ) from error


def _error(requested: str, done: subprocess.CompletedProcess[str]) -> LaunchError:
    return LaunchError(
        requested,
        found=" ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode} and no message",
        rule="Slurm's controller answers",
        fix="launch where the cluster's own commands work",
    )
