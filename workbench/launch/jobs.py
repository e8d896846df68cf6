"""torchx jobs: start one on this machine, on Slurm or on Kubernetes, poll it, cancel it, or only show its request.

The only module that talks to a torchx runner. It works around: a runner created on the main thread replaces the
signal handlers of a notebook kernel; every poll of a finished local job signals its old process group, whose id may
be reused by then; a job is a zombie until it is polled. On Slurm, torchx 0.7 requests a requeue that would run a
half-done run again, gives the task one core on Slurm 22.05 and later, needs accounting, and fails on a cancelled job;
on Kubernetes it invents a new name each time.

On a cluster a job outlives the process that submitted it. Its run directory and the project must be on a file system
that the cluster's nodes see under the same paths: the ranks write there, and all readers read there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import psutil

from workbench.errors import LaunchError
from workbench.launch.component import WORKER, Cluster, run_job
from workbench.launch.devices import Placement
from workbench.records.directory import ENDED, RunDirectory

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDef, AppDryRunInfo

LOCAL, SLURM, KUBERNETES = "local_cwd", "slurm", "kubernetes"

SCHEDULERS = (LOCAL, SLURM, KUBERNETES)
"""torchx's names of the supported schedulers."""

POLL_INTERVAL_S = 5.0
"""Interval at which a cluster is asked about a job; in between the last answer is valid."""

UNKNOWN_FOR_S = 600.0
"""A job that its cluster does not know for this long has failed."""

_RESERVED = (
    "log_dir",
    "job_dir",
    "prepend_cwd",
    "auto_set_cuda_visible_devices",
    "validate_spec",
    "workspace_type",
    "image_repo",
    "quiet",
)
"""Settings of torchx that users may not set: logs go to the run directory, GPUs are assigned here, and no image is
built."""

_SESSION = "TORCHX_INTERNAL_SESSION_ID"  # torchx after 0.7 gives each submitting process another number
_SHARED = "run directory and project must be on a file system that the cluster's nodes see under the same paths"


class Job(Protocol):
    """A started run, in any of the ways to start one.

    Attributes:
        handle: the scheduler's name for the job.
        agent: the process that starts the ranks, {"pid", "create_time"}; None if it is not on this machine.
    """

    handle: str
    agent: dict[str, Any] | None

    def poll(self) -> str:
        """Current state: running, succeeded, failed or cancelled. A queued job is running."""
        ...

    def cancel(self) -> None:
        """End it; nothing if it has ended."""
        ...


def start(
    run: RunDirectory,
    world_size: int,
    placement: Placement,
    *,
    project: Path,
    worker: str = WORKER,
    scheduler: str = LOCAL,
    options: Mapping[str, str] | None = None,
) -> Job:
    """Start the job of a run, or submit it to a cluster.

    Args:
        run: the run directory. torchx's own files go to its ``torchx`` folder.
        world_size: ranks, all on one node.
        placement: device of the ranks; on a cluster only the number of its GPUs counts.
        project: folder that paths in the spec are relative to.
        worker: module that every rank runs.
        scheduler: one of `SCHEDULERS`.
        options: of the scheduler, see `options_of`.

    Raises:
        LaunchError: an unknown or missing option, or the job was not accepted.
    """
    request = _request(run.name, run.path, world_size, placement, project, worker, scheduler, options or {})
    (run.path / "torchx").mkdir(exist_ok=True)
    if scheduler == LOCAL:
        return _start_local(request)
    try:
        return ClusterJob(_runner().schedule(request.plan), run)
    except Exception as error:
        raise LaunchError(
            f"submit run {run.name} to {scheduler}",
            found=_why_refused(request, error),
            rule=f"{scheduler} accepts the job; {_SHARED}",
            fix="launch where the cluster's own commands work, and check the options; "
            "--dry-run shows the exact request",
        ) from error


def describe(
    name: str,
    run_path: Path,
    world_size: int,
    placement: Placement,
    *,
    project: Path,
    worker: str = WORKER,
    scheduler: str = LOCAL,
    options: Mapping[str, str] | None = None,
) -> str:
    """Return the exact request of `start`: a command, an sbatch script, or YAML. Nothing is created or contacted.

    Args:
        name: of the run.
        run_path: its run directory, which need not exist.
        world_size: ranks.
        placement: device of the ranks.
        project: folder that paths in the spec are relative to.
        worker: module that every rank runs.
        scheduler: one of `SCHEDULERS`.
        options: of the scheduler, see `options_of`.

    Raises:
        LaunchError: as `start`, for what can be checked before.
    """
    request = _request(name, run_path, world_size, placement, project, worker, scheduler, options or {})
    if scheduler == SLURM:
        command, script = shlex.join(request.plan.request.cmd), request.plan.request.materialize()
        return f"{command} <<'SBATCH'\n{script}SBATCH\n"
    if scheduler == KUBERNETES:
        return str(request.plan.request).rstrip() + "\n"
    [role] = request.app.roles
    hidden = ("TORCHX_JOB_ID", "PATH", _SESSION)  # set by torchx
    environment = {**{key: value for key, value in role.env.items() if key not in hidden}, "WB_PARENT_PID": "$$"}
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


def options_of(scheduler: str) -> dict[str, str]:
    """Options of a scheduler: name -> meaning, marked if the option is needed.

    Those of Slurm and Kubernetes are torchx's own (of the installed version), and ours: ``python``, the interpreter
    there; ``memory_mb`` of the host for each rank, 0 to request none; and on Kubernetes ``image`` and ``mounts``
    (``type=volume,src=<claim>,dst=<folder>``), through which the pod sees run directory and project.

    Raises:
        LaunchError: no such scheduler.
    """
    meanings = {
        name: " ".join(option.help.split()) + (" (needed)" if option.is_required else "")
        for name, option in _torchx_options(scheduler).items()
    }
    if scheduler != LOCAL:
        meanings |= {
            "python": "The interpreter on the cluster (python)",
            "memory_mb": "Memory of the host for each rank; 0 asks for none",
        }
    if scheduler == KUBERNETES:
        meanings |= {
            "image": "The container image, with the workbench's requirements in it (needed)",
            "mounts": "type=volume,src=<claim>,dst=<folder>: where the pod sees run directory and project",
        }
    return meanings


def agent_output(log_dir: Path) -> str:
    """Standard error of the agents of the jobs under this folder."""
    files = sorted([*log_dir.glob("*/*/trainer/0/stderr.log"), *log_dir.glob("slurm-*.err")])
    return "\n".join(file.read_text(encoding="utf8", errors="replace") for file in files)


# ---- jobs on this machine ------------------------------------------------------------------------------


class LocalJob:
    """A child of this process.

    Attributes:
        handle: torchx's name for it.
        agent: the process that starts the ranks, {"pid", "create_time"}; None if it has ended already.
    """

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self.agent: dict[str, Any] | None = None
        with contextlib.suppress(Exception):
            [[replica]] = _runner()._scheduler(LOCAL)._apps[handle.rsplit("/", 1)[-1]].role_replicas.values()
            self.agent = {"pid": replica.proc.pid, "create_time": psutil.Process(replica.proc.pid).create_time()}
        self._ended: str | None = None

    def poll(self) -> str:
        """Current state: running, succeeded, failed or cancelled.

        torchx is never asked again after the end.
        """
        if self._ended is None:
            status = _runner().status(self.handle)
            if status is None:
                self._end("failed")
            elif status.is_terminal():
                self._end(status.state.name.lower())
        return self._ended or "running"

    def cancel(self) -> None:
        """Stop all its processes; nothing if it has ended."""
        if self.poll() == "running":
            _runner().cancel(self.handle)
            self._end("cancelled")

    def _end(self, state: str) -> None:
        self._ended = state
        # A deleted scheduler signals the process groups of all its jobs, ended ones too.
        with contextlib.suppress(Exception):
            _runner()._scheduler(LOCAL)._apps.pop(self.handle.rsplit("/", 1)[-1], None)


def _start_local(request: _Request) -> LocalJob:
    try:
        return LocalJob(_runner().schedule(request.plan))
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
        handle: torchx's name for it.
        trouble: the error of the last question to the cluster, "" if it answered. A cluster that does not answer has
            not ended the job, so it still counts as running.
    """

    def __init__(self, handle: str, run: RunDirectory | None = None) -> None:
        self.handle, self.trouble, self.agent = handle, "", None
        self._run = run
        self._ended: str | None = None
        self._asked_s = self._known_s = time.monotonic()
        self._first = True

    def poll(self) -> str:
        """Current state: running, succeeded, failed or cancelled; asks the cluster every `ASK_EVERY_S` at most.

        If the cluster has no record of ended jobs, the end is read from the run directory.
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
            try:
                _runner().cancel(self.handle)
            except Exception:  # torchx asks for the job's state first, which fails without accounting
                scheduler, app_id = self.handle.partition("://")[0], self.handle.rpartition("/")[2]
                _runner()._scheduler(scheduler)._cancel_existing(app_id)
        except Exception as error:
            raise LaunchError(
                f"cancel {self.handle}",
                found=_message(error),
                rule="the cluster takes the request",
                fix="cancel it where the cluster's own commands work",
            ) from error
        self._ended = "cancelled"

    def _ask(self) -> str | None:
        """The end of the job by the cluster's answer; None while it runs, or if its state is unknown."""
        try:
            with _quietly():
                status = _runner().status(self.handle)
        except Exception as error:
            return self._unanswered(error)
        self.trouble = ""
        if status is not None and status.is_terminal():
            return status.state.name.lower()
        if status is not None and status.state.name != "UNKNOWN":
            self._known_s = time.monotonic()
        elif (ended := self._end_in_run_directory()) is not None:
            return ended
        return "failed" if time.monotonic() - self._known_s > UNKNOWN_FOR_S else None

    def _unanswered(self, error: Exception) -> str | None:
        text = _message(error)
        if "slurm state CANCELLED" in text:  # torchx 0.7 does not know the state "CANCELLED by 1000"
            return "cancelled"
        if getattr(error, "status", None) == 404:  # Kubernetes has no record of a deleted job
            return self._end_in_run_directory() or "cancelled"
        self.trouble = text
        return self._end_in_run_directory()

    def _end_in_run_directory(self) -> str | None:
        state = self._run.state["state"] if self._run else ""
        return state if state in ENDED and state != "lost" else None


def _why_refused(request: _Request, error: Exception) -> str:
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
    return _message(error)


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


# ---- requests ------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    scheduler: str
    app: AppDef
    plan: AppDryRunInfo


def _request(
    name: str,
    run_path: Path,
    world_size: int,
    placement: Placement,
    project: Path,
    worker: str,
    scheduler: str,
    options: Mapping[str, str],
) -> _Request:
    """The request of torchx with our corrections; nothing is contacted."""
    settings, cluster = _checked(scheduler, options)
    run_path = run_path.resolve()
    name = _kubernetes_name(name, run_path) if scheduler == KUBERNETES else name
    try:
        app = run_job(name, run_path, world_size, placement, project=project, worker=worker, cluster=cluster)
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"option mounts = {options.get('mounts')!r}",
            found=_message(error),
            rule="type=volume,src=<claim>,dst=<folder>, or type=bind,src=<folder>,dst=<folder>; with "
            "commas for several",
            fix="correct the option",
        ) from None
    if scheduler == LOCAL:
        settings = {"log_dir": str(run_path / "torchx")}
    if scheduler == SLURM:
        _refuse_commas(app)
    if "validate_spec" in dict(_runner().scheduler_run_opts(scheduler)):
        settings["validate_spec"] = False  # torchx after 0.7 would ask the cluster
    try:
        with _quietly():
            plan = _runner().dryrun(app, scheduler, cfg=settings)
    except Exception as error:
        raise LaunchError(
            f"describe run {name} to {scheduler}",
            found=_message(error),
            rule="torchx makes a request of it",
            fix="check the options",
        ) from error
    if scheduler == SLURM:
        _correct_slurm(plan.request, name, run_path)
    if scheduler == KUBERNETES:
        plan.request.resource = _renamed(plan.request.resource, name)
    return _Request(scheduler, app, plan)


def _checked(scheduler: str, options: Mapping[str, str]) -> tuple[dict[str, Any], Cluster | None]:
    """Split the options of a scheduler into torchx's settings and ours."""
    torchx_options, known = _torchx_options(scheduler), options_of(scheduler)
    if unknown := sorted(set(options) - set(known)):
        raise LaunchError(
            f"options of {scheduler}: {', '.join(unknown)}",
            found="not options of this scheduler",
            rule=f"it takes {', '.join(sorted(known)) or 'none'}",
            fix="correct the name; Slurm reads options that torchx does not pass on from SBATCH_... variables"
            if scheduler == SLURM
            else "correct the name, or leave it out",
        )
    needed = [name for name, option in torchx_options.items() if option.is_required]
    needed += ["image"] if scheduler == KUBERNETES else []
    if missing := [name for name in needed if not options.get(name)]:
        raise LaunchError(
            f"a {scheduler} job without {' and '.join(missing)}",
            found=", ".join(f"{key}={value}" for key, value in options.items()) or "no options",
            rule="; ".join(f"{name}: {known[name]}" for name in missing),
            fix=f"give --scheduler {' '.join(f'{name}=...' for name in missing)}, in Python options=...",
        )
    settings = {
        name: _value(name, options[name], option.opt_type) for name, option in torchx_options.items() if name in options
    }
    if scheduler == LOCAL:
        return settings, None
    memory_mb = _value("memory_mb", options["memory_mb"], int) if "memory_mb" in options else None
    return settings, Cluster(
        python=options.get("python", "python"),
        memory_mb=memory_mb,
        image=options.get("image", ""),
        mounts=options["mounts"].split(",") if options.get("mounts") else (),
    )


def _torchx_options(scheduler: str) -> dict[str, Any]:
    if scheduler not in SCHEDULERS:
        raise LaunchError(
            f"a job for scheduler {scheduler!r}",
            found=repr(scheduler),
            rule=f"one of {', '.join(SCHEDULERS)}",
            fix="choose one of them",
        )
    if scheduler == KUBERNETES and importlib.util.find_spec("kubernetes") is None:
        raise LaunchError(
            "a job for Kubernetes",
            found="the package kubernetes is not installed",
            rule="torchx talks to Kubernetes through it",
            fix="pip install kubernetes",
        )
    return {name: option for name, option in _runner().scheduler_run_opts(scheduler) if name not in _RESERVED}


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return kind(text) if kind in (int, float) else text
    except (KeyError, ValueError):
        raise LaunchError(
            f"option {name} = {text!r}",
            found=repr(text),
            fix="correct the value",
            rule="true or false" if kind is bool else "a number",
        ) from None


def _refuse_commas(app: AppDef) -> None:
    """Refuse commas in the environment: Slurm splits torchx's exports there, and the rest of a value would be lost."""
    for name, value in app.roles[0].env.items():
        if "," in value:
            raise LaunchError(
                f"give a Slurm job {name}={value}",
                found="a comma",
                rule="sbatch --export ends a value at a comma",
                fix="use a path without commas",
            )


def _correct_slurm(request: Any, name: str, run_path: Path) -> None:
    """Correct torchx's script where it would lose a run, cores or output."""
    request.cmd.append(f"--chdir={run_path / 'torchx'}")  # its output, too, belongs to the run
    for replica in request.replicas.values():
        # a requeued job would run a half-done run directory again: `workbench run` creates a new one
        replica.sbatch_opts.pop("requeue", None)
        replica.sbatch_opts = {"no-requeue": None, "nodes": "1", "ntasks": "1"} | replica.sbatch_opts
        replica.sbatch_opts.pop("ntasks-per-node", None)  # --gpus-per-task needs the number of tasks instead
        # since Slurm 22.05 a step does not inherit it, and all ranks would share one core
        replica.srun_opts["cpus-per-task"] = replica.sbatch_opts["cpus-per-task"]
        replica.env.pop(_SESSION, None)
        replica.name = f"{name}-0"  # as squeue shows it


def _kubernetes_name(name: str, run_path: Path) -> str:
    """A name for a run's job: legal for jobs, pods and labels, and the same for the same run directory."""
    legal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:36].rstrip("-")
    return f"wb-{legal}-{hashlib.sha256(str(run_path).encode()).hexdigest()[:8]}"


def _renamed(resource: Any, name: str) -> dict[str, Any]:
    """Return the resource under our name in place of torchx's random one."""
    from torchx.schedulers import kubernetes_scheduler

    plain = json.dumps(kubernetes_scheduler.sanitize_for_serialization(resource))
    renamed = json.loads(plain.replace(resource["metadata"]["name"], name))
    for task in renamed["spec"]["tasks"]:
        for container in task["template"]["spec"]["containers"]:
            container["env"] = [variable for variable in container["env"] if variable["name"] != _SESSION]
    return renamed


@contextlib.contextmanager
def _quietly() -> Any:
    """Suppress the warnings of torchx, which users cannot fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@functools.cache
def _runner() -> Runner:
    """The runner of this process, created in a thread that ends at once, so that no signal handler is replaced."""
    runners: list[Runner] = []
    errors: list[BaseException] = []

    def create() -> None:
        try:
            from torchx.runner import get_runner

            runner = get_runner()
            runner.scheduler_run_opts(LOCAL)  # creates the scheduler, which installs the handlers
            slurm = runner._scheduler(SLURM)
            if hasattr(slurm, "_partition_memmb"):  # runs sinfo to leave --mem out; memory_mb=0 does so instead
                slurm._partition_memmb = lambda partition: None
            runners.append(runner)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return runners[0]
