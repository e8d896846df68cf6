"""Jobs: start one on this machine, on Slurm or on Kubernetes, poll it, cancel it, or only show its request.

torchx makes the requests, but for those of the scheduler ``sbatch``, a plain script (`workbench.launch.sbatch`).

Works around torchx: every poll of a finished local job signals its old process group, whose id may be reused by then; a
job is a zombie until it is polled. Slurm is asked by `workbench.launch.slurm`: torchx 0.7 asks the accounting only,
which not every cluster has.

On a cluster a job outlives the process that submitted it. Its run directory and the project must be on a file system
that the cluster's nodes see under the same paths: the ranks write there, and all readers read there.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from workbench.errors import LaunchError
from workbench.launch import processes, sbatch, slurm
from workbench.launch.component import SESSION, WORKER, Request, job_folder, request_of
from workbench.launch.devices import Placement
from workbench.launch.nodes import HEAD, HEAD_IN, NODE
from workbench.launch.options import KUBERNETES, LOCAL, SBATCH, SLURM, message, quietly, runner
from workbench.records.directory import RunDirectory
from workbench.records.states import ENDED

POLL_INTERVAL_S = 5.0
"""Interval at which a cluster is asked about a job; in between the last answer is valid."""

UNKNOWN_FOR_S = 20.0
"""A job has failed if its cluster answers for this long that it knows no such job. Slurm's controller knows a job from
`sbatch` on and forgets it only after its end."""

_SHARED = "run directory and project must be on a file system that the cluster's nodes see under the same paths"


class Job(Protocol):
    """A started run, in any of the ways to start one.

    Attributes:
        handle: the scheduler's name for the job.
        reason: the state in the scheduler's words, with why it waits or what ended it; "" without a scheduler.
        ended_by_scheduler: the scheduler ended it, for a time limit, a preemption or a node.
    """

    handle: str
    reason: str
    ended_by_scheduler: bool

    @property
    def agent(self) -> dict[str, Any] | None:
        """The process that starts the ranks, {"pid", "create_time"}; None if it is not on this machine."""
        ...

    def poll(self) -> str:
        """Current state: running, succeeded, failed or cancelled. A queued job is running."""
        ...

    def cancel(self) -> None:
        """End it; nothing if it has ended."""
        ...


def start(
    runs: Sequence[RunDirectory],
    world_size: int,
    placement: Placement,
    *,
    project: Path,
    worker: str = WORKER,
    scheduler: str = LOCAL,
    options: Mapping[str, str] | None = None,
) -> Job:
    """Start the job of some runs, which its ranks execute one after another, or submit it to a cluster.

    Args:
        runs: the run directories. torchx's own files go to the ``torchx`` folder of the first.
        world_size: ranks.
        placement: device and nodes of the ranks; on a cluster only the number of its GPUs counts.
        project: folder that paths in the spec are relative to.
        worker: module that every rank runs.
        scheduler: one of `workbench.launch.options.SCHEDULERS`, or sbatch.
        options: of the scheduler, see `workbench.launch.options.options_of`.

    Raises:
        LaunchError: an unknown or missing option, or the job was not accepted.
    """
    names, paths = [run.name for run in runs], [run.path for run in runs]
    folder = job_folder(runs[0])
    # forked ranks have one agent
    server = processes.address() if scheduler == LOCAL and placement.nodes == 1 else ""
    resumable = all(run.spec.record.checkpoint_every for run in runs)
    if scheduler == SBATCH:
        text = sbatch.script(
            names, paths, world_size, placement, project=project, worker=worker, options=options, resumable=resumable
        )
        folder.mkdir(exist_ok=True)
        return ClusterJob(sbatch.submit(text), runs)
    request = request_of(
        names, paths, world_size, placement, project, worker, scheduler, options or {}, server, resumable=resumable
    )
    folder.mkdir(exist_ok=True)
    if scheduler == LOCAL:
        return _start_local(request)
    try:
        return ClusterJob(runner().schedule(request.plan), runs)
    except Exception as error:
        raise LaunchError(
            f"submit run {' and '.join(names)} to {scheduler}",
            found=_why_refused(request, error),
            rule=f"{scheduler} accepts the job; {_SHARED}",
            fix="launch where the cluster's own commands work, and check the options; "
            "--dry-run shows the exact request",
        ) from error


def describe(
    names: Sequence[str],
    run_paths: Sequence[Path],
    world_size: int,
    placement: Placement,
    *,
    project: Path,
    worker: str = WORKER,
    scheduler: str = LOCAL,
    options: Mapping[str, str] | None = None,
    resumable: bool = False,
) -> str:
    """Return the exact request of `start`: a command, an sbatch script, or YAML. Nothing is created or contacted.

    It takes what `start` takes, but names and paths of runs that need not exist. `resumable`: each saves checkpoints.

    Raises:
        LaunchError: as `start`, for what can be checked before.
    """
    if scheduler == SBATCH:
        text = sbatch.script(
            names,
            run_paths,
            world_size,
            placement,
            project=project,
            worker=worker,
            options=options,
            resumable=resumable,
        )
        return f"sbatch --parsable <<'SBATCH'\n{text}SBATCH\n"
    request = request_of(
        names, run_paths, world_size, placement, project, worker, scheduler, options or {}, resumable=resumable
    )
    if scheduler == SLURM:
        command, script = shlex.join(request.plan.request.cmd), request.plan.request.materialize()
        return f"{command} <<'SBATCH'\n{script}SBATCH\n"
    if scheduler == KUBERNETES:
        return str(request.plan.request).rstrip() + "\n"
    [role] = request.app.roles
    if placement.nodes > 1:
        return "\n".join(_shown(role, node) for node in range(placement.nodes))
    return _shown(role)


def _shown(role: Any, node: int | None = None) -> str:
    """The command of an agent on this machine; of one of several with the variables that torchx fills in."""
    hidden = ("TORCHX_JOB_ID", "PATH", SESSION)  # set by torchx
    environment = {**{key: value for key, value in role.env.items() if key not in hidden}, "WB_PARENT_PID": "$$"}
    if node is not None:
        environment |= {NODE: str(node), HEAD: "localhost"}
        environment.pop(HEAD_IN)
    variables = [f"{key}={value if value == '$$' else shlex.quote(value)}" for key, value in environment.items()]
    return " \\\n  ".join(["env", *variables, shlex.join([role.entrypoint, *role.args])]) + "\n"


def job_of(handle: str) -> Job:
    """Return a job on a cluster from the handle in its run's state; any process may poll and cancel it.

    Raises:
        LaunchError: the handle is not that of a cluster's job.
    """
    if handle.partition("://")[0] not in (SLURM, KUBERNETES):
        raise LaunchError(
            f"find job {handle!r} again",
            found="a job of one machine, or none",
            rule="only a cluster knows its jobs by name: slurm://... or kubernetes://...",
            fix="end the processes that the run's state names: agent, then rank0",
        )
    return ClusterJob(handle)


# ---- jobs on this machine ------------------------------------------------------------------------------


class LocalJob:
    """A child of this process; its `agent` is None if that has ended already."""

    reason, ended_by_scheduler = "", False

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self.agent: dict[str, Any] | None = None
        with contextlib.suppress(Exception):
            [[replica, *_]] = runner()._scheduler(LOCAL)._apps[handle.rsplit("/", 1)[-1]].role_replicas.values()
            self.agent = {"pid": replica.proc.pid, "create_time": psutil.Process(replica.proc.pid).create_time()}
        self._ended: str | None = None

    def poll(self) -> str:
        """Current state, as of every `Job`; torchx is never asked again after the end."""
        if self._ended is None:
            status = runner().status(self.handle)
            if status is None:
                self._end("failed")
            elif status.is_terminal():
                self._end(status.state.name.lower())
        return self._ended or "running"

    def cancel(self) -> None:
        """Stop all its processes; nothing if it has ended."""
        if self.poll() == "running":
            runner().cancel(self.handle)
            self._end("cancelled")

    def _end(self, state: str) -> None:
        self._ended = state
        # A deleted scheduler signals the process groups of all its jobs, ended ones too.
        with contextlib.suppress(Exception):
            runner()._scheduler(LOCAL)._apps.pop(self.handle.rsplit("/", 1)[-1], None)


def _start_local(request: Request) -> LocalJob:
    try:
        return LocalJob(runner().schedule(request.plan))
    except Exception as error:
        _close_logs_of(error)
        raise LaunchError(
            f"start job {request.app.name}",
            found=f"{type(error).__name__}: {error}",
            rule="torchx starts the job's agent as a child process",
            fix="check memory, process limits and space in the run directory",
        ) from error


def _close_logs_of(error: BaseException) -> None:
    """Close the logs of a process that did not start; torchx 0.7 leaves them open, and a thread that reads them."""
    from torchx.schedulers.streams import Tee

    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, Tee | io.FileIO):
                value.close()


# ---- jobs on a cluster ---------------------------------------------------------------------------------


class ClusterJob:
    """A job of Slurm or Kubernetes, known by its handle in any process.

    Attributes:
        trouble: the error of the last question to the cluster, "" if it answered. A cluster that does not answer has
            not ended the job, so it still counts as running.
    """

    def __init__(self, handle: str, runs: Sequence[RunDirectory] = ()) -> None:
        self.handle, self.trouble, self.agent = handle, "", None
        self.reason, self.ended_by_scheduler = "", False
        self._runs = runs
        self._ended: str | None = None
        self._asked_s = self._known_s = time.monotonic()
        self._first = True

    def poll(self) -> str:
        """Current state, as of every `Job`; asks the cluster every `POLL_INTERVAL_S` at most.

        If the cluster has no record of ended jobs, the end is read from the run directories.
        """
        if self._ended is None and (self._first or time.monotonic() - self._asked_s >= POLL_INTERVAL_S):
            self._ended, self._asked_s, self._first = self._ask(), time.monotonic(), False
        return self._ended or "running"

    def cancel(self) -> None:
        """Ask the cluster to end it, which may take a while; nothing if it has ended.

        Raises:
            LaunchError: the cluster did not take the request.
        """
        if self.poll() != "running":
            return
        try:
            if self._on_slurm:
                slurm.cancel(self._job_id)
            else:
                runner().cancel(self.handle)
        except Exception as error:
            raise LaunchError(
                f"cancel {self.handle}",
                found=message(error),
                rule="the cluster takes the request",
                fix="cancel it where the cluster's own commands work",
            ) from error
        self._ended = "cancelled"

    @property
    def _on_slurm(self) -> bool:
        return self.handle.partition("://")[0] == SLURM

    @property
    def _job_id(self) -> str:
        return self.handle.rpartition("/")[2]

    def _ask(self) -> str | None:
        """The end of the job by the cluster's answer; None while it runs, or if its state is unknown."""
        try:
            known, ended = self._ask_slurm() if self._on_slurm else self._ask_torchx()
        except Exception as error:
            if getattr(error, "status", None) == 404:  # Kubernetes has no record of a deleted job
                return self._end_in_run_directories() or "cancelled"
            self.trouble = message(error)
            return self._end_in_run_directories()
        self.trouble = ""
        if known:
            self._known_s = time.monotonic()
            return ended
        return self._end_in_run_directories() or (
            "failed" if time.monotonic() - self._known_s > UNKNOWN_FOR_S else None
        )

    def _ask_slurm(self) -> tuple[bool, str | None]:
        """True if Slurm knows the job, and its end; the reason is stored."""
        job = slurm.ask(self._job_id)
        if job is None:
            return False, None
        self.reason, self.ended_by_scheduler = str(job), job.ended_by_scheduler
        return True, job.ended

    def _ask_torchx(self) -> tuple[bool, str | None]:
        """True if the cluster knows the job, and its end."""
        with quietly():
            status = runner().status(self.handle)
        if status is None or status.state.name == "UNKNOWN":
            return False, None
        return True, status.state.name.lower() if status.is_terminal() else None

    def _end_in_run_directories(self) -> str | None:
        """The end of the job by its runs: the first that did not succeed ended it. None if it may run."""
        states = [run.state["state"] for run in self._runs]
        if "failed" in states or not states:
            return "failed" if states else None
        return states[-1] if all(state in ENDED and state != "lost" for state in states) else None


def _why_refused(request: Request, error: Exception) -> str:
    """The cluster's own message. torchx lets sbatch print it to the terminal only, so sbatch is run again for it."""
    if isinstance(error, FileNotFoundError):
        return f"no {error.filename} on this machine"
    if isinstance(error, subprocess.CalledProcessError) and request.scheduler == SLURM:
        sbatch = request.plan.request
        command = ["sbatch", "--test-only", *(part for part in sbatch.cmd[1:] if part.startswith("--"))]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            again = subprocess.run(command, input=sbatch.materialize(), text=True, timeout=60, capture_output=True)
            if again.returncode and again.stderr.strip():
                return again.stderr.strip()
    return message(error)
