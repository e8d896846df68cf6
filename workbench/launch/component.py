"""The torchx job of some runs: the same description for every scheduler, and the request that torchx makes of it.

torchx's own `dist.ddp` starts `bash -c torchrun` from PATH, which is missing in a kernel whose environment was not
activated. This one starts the running interpreter.

Works around: on Slurm, torchx 0.7 requests a requeue that would run a half-done run again and gives the task one core
on Slurm 22.05 and later; on Kubernetes it invents a new name each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workbench.errors import LaunchError
from workbench.launch.devices import Placement
from workbench.launch.nodes import HEAD_IN, NODE
from workbench.launch.options import KUBERNETES, LOCAL, SLURM, Cluster, checked, message, quietly, runner
from workbench.records.directory import RunDirectory
from workbench.records.provenance import python_path

if TYPE_CHECKING:
    from torchx.specs import AppDef, AppDryRunInfo

WORKER = "workbench.train.worker"
"""The module that every rank runs."""

MEMORY_MB = {"cpu": 4096, "cuda": 16384}
"""Host memory requested from a cluster for each rank, by default."""

SESSION = "TORCHX_INTERNAL_SESSION_ID"  # torchx after 0.7 gives each submitting process another number


def run_job(
    name: str,
    run_paths: Sequence[Path],
    world_size: int,
    placement: Placement,
    *,
    project: Path,
    worker: str = WORKER,
    cluster: Cluster | None = None,
    fork_server: str = "",
) -> AppDef:
    """Build the job whose ranks execute run directories one after another; see `workbench.launch.jobs.start`.

    Without a cluster it is a child of this process and ends with it; a fork server's socket lets its ranks be forks,
    see `workbench.launch.processes`. On a cluster it outlives this process, and the scheduler assigns GPUs; the
    interpreter, run directories and project have the same paths there as here, on a shared file system.
    """
    from torchx import specs

    environment, target = environment_of(placement), cluster or Cluster()
    if cluster is None:
        environment["WB_PARENT_PID"] = str(os.getpid())
        if fork_server:
            environment["WB_FORK_SERVER"] = fork_server
    else:
        environment = {key: value for key, value in environment.items() if not key.startswith("CUDA_")}
    nodes, ranks = placement.nodes, world_size // placement.nodes  # ranks of a node
    replicas = 1 if target.tasks else nodes
    if replicas > 1:
        environment |= {NODE: specs.macros.replica_id, HEAD_IN: specs.macros.rank0_env}
    memory_mb = MEMORY_MB[placement.device] if target.memory_mb is None else target.memory_mb
    role = specs.Role(
        name="trainer",
        image=target.image,
        entrypoint=target.python or sys.executable,
        args=agent_arguments(world_size, nodes, run_paths, project, worker),
        env=environment,
        num_replicas=replicas,
        mounts=specs.parse_mounts(list(target.mounts)) if target.mounts else [],
        # on this machine `slots` assigns GPUs: torchx would start at device 0 for every job
        resource=specs.Resource(cpu=ranks, memMB=memory_mb * ranks, gpu=len(placement.gpus) // nodes if cluster else 0),
    )
    return specs.AppDef(name=name, roles=[role])


def agent_arguments(
    world_size: int, nodes: int, run_paths: Sequence[Path], project: Path, worker: str = WORKER
) -> list[str]:
    """Arguments of the interpreter for the agent of each node, which executes run directories one after another."""
    ranks = f"--nproc-per-node={world_size // nodes} --max-restarts=0"
    agent = f"-m workbench.launch.agent {'--standalone ' if nodes == 1 else ''}--nnodes={nodes} {ranks}"
    paths = [str(path.resolve()) for path in run_paths]
    return [*agent.split(), "-m", worker, *paths, "--project", str(project.resolve())]


def environment_of(placement: Placement) -> dict[str, str]:
    """Environment variables of a job's processes, for every way to start them on this machine."""
    environment = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores, and sums keep one order
        "WORKBENCH_DEVICE": placement.device,
        "PYTHONPATH": python_path(),
    }
    if placement.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.gpus)
        environment["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's, as our ids
    return environment


def job_folder(run: RunDirectory) -> Path:
    """Folder of the torchx files of a run's job, which is that of the job's first run."""
    return run.path.with_name(run.state.get("job_of", run.path.name)) / "torchx"


def agent_output(log_dir: Path) -> str:
    """Standard error of the agents of the jobs under this folder, and the errors of Slurm's own programs.

    What srun says of every task that ended comes last: it names no cause, and a busy node's own words may be heard
    after it.
    """
    files = sorted([*log_dir.glob("*/*/trainer/*/stderr.log"), *log_dir.glob("slurm-*.err")])
    slurm = [line for file in sorted(log_dir.glob("slurm-*.out")) for line in _text(file).splitlines()]
    lines = [*(line for file in files for line in _text(file).splitlines()), *filter(_SLURM_ERROR.match, slurm)]
    return "\n".join(sorted(lines, key=lambda line: bool(_SRUN_ENDS.match(line))))


_SLURM_ERROR = re.compile(r"(srun|slurmstepd\S*): (error|fatal)")  # others are the lines of the script that it runs
_SRUN_ENDS = re.compile(r"srun: (error: \S+: tasks? [\d,-]+: |launch/slurm: )")


def _text(file: Path) -> str:
    return file.read_text(encoding="utf8", errors="replace")


# ---- requests ------------------------------------------------------------------------------------------


class Request(NamedTuple):
    """The request that torchx makes of a job."""

    scheduler: str
    app: AppDef
    plan: AppDryRunInfo


def job_name(runs: Sequence[str]) -> str:
    """Name of a job: that of its first run, and how many more it executes."""
    return runs[0] if len(runs) == 1 else f"{runs[0]}-and-{len(runs) - 1}-more"


def request_of(
    names: Sequence[str],
    run_paths: Sequence[Path],
    world_size: int,
    placement: Placement,
    project: Path,
    worker: str,
    scheduler: str,
    options: Mapping[str, str],
    fork_server: str = "",
    *,
    resumable: bool = False,
) -> Request:
    """The request of torchx with our corrections; nothing is contacted. Its files go to the first run's folder.

    `resumable`: the runs save checkpoints, so a job that was preempted may be started again.
    """
    settings, cluster = checked(scheduler, options)
    run_path, name = run_paths[0].resolve(), job_name(names)
    name = _kubernetes_name(name, run_path) if scheduler == KUBERNETES else name
    try:
        app = run_job(
            name,
            run_paths,
            world_size,
            placement,
            project=project,
            worker=worker,
            cluster=cluster,
            fork_server=fork_server,
        )
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"option mounts = {options.get('mounts')!r}",
            found=message(error),
            rule="type=volume,src=<claim>,dst=<folder>, or type=bind,src=<folder>,dst=<folder>; with "
            "commas for several",
            fix="correct the option",
        ) from None
    if scheduler == LOCAL:
        settings = {"log_dir": str(run_path / "torchx")}
    commas = [f"{key}={value}" for key, value in app.roles[0].env.items() if "," in value]
    if commas and scheduler == SLURM:
        raise LaunchError(
            f"give a Slurm job {commas[0]}",
            found="a comma",
            rule="sbatch --export ends a value at a comma",  # and the rest of it would be lost
            fix="use a path without commas",
        )
    if "validate_spec" in dict(runner().scheduler_run_opts(scheduler)):
        settings["validate_spec"] = False  # torchx after 0.7 would ask the cluster
    try:
        with quietly():
            plan = runner().dryrun(app, scheduler, cfg=settings)
    except Exception as error:
        raise LaunchError(
            f"describe run {name} to {scheduler}",
            found=message(error),
            rule="torchx makes a request of it",
            fix="check the options",
        ) from error
    if scheduler == SLURM:
        _correct_slurm(plan.request, name, run_path, placement.nodes, resumable=resumable)
    if scheduler == KUBERNETES:
        plan.request.resource = _renamed(plan.request.resource, name)
    return Request(scheduler, app, plan)


def _correct_slurm(request: Any, name: str, run_path: Path, nodes: int, *, resumable: bool) -> None:
    """Correct torchx's script where it would lose a run, cores or output."""
    request.cmd.append(f"--chdir={run_path / 'torchx'}")  # its output, too, belongs to the run
    for replica in request.replicas.values():
        # without a checkpoint a requeued job would run a half-done run directory again: `workbench run` creates a new
        # one; with checkpoints the job resumes (`workbench.launch.requeue`) and adds to its output
        replica.sbatch_opts.pop("requeue", None)
        requeue = {"requeue": None, "open-mode": "append"} if resumable else {"no-requeue": None}
        replica.sbatch_opts = {**requeue, "nodes": str(nodes), "ntasks": str(nodes)} | replica.sbatch_opts
        replica.sbatch_opts.pop("ntasks-per-node", None)  # --gpus-per-task needs the number of tasks instead
        # since Slurm 22.05 a step does not inherit it, and all ranks would share one core
        replica.srun_opts["cpus-per-task"] = replica.sbatch_opts["cpus-per-task"]
        replica.env.pop(SESSION, None)
        replica.name = f"{name}-0"  # as squeue shows it


def _kubernetes_name(name: str, run_path: Path) -> str:
    """A name for a run's job: legal for jobs, pods and labels, and the same for the same run directory."""
    legal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:36].rstrip("-")
    return f"wb-{legal}-{hashlib.sha256(str(run_path).encode()).hexdigest()[:8]}"


def _renamed(resource: Any, name: str) -> dict[str, Any]:
    """The resource under our name in place of torchx's random one."""
    from torchx.schedulers import kubernetes_scheduler

    plain = json.dumps(kubernetes_scheduler.sanitize_for_serialization(resource))
    renamed = json.loads(plain.replace(resource["metadata"]["name"], name))
    for task in renamed["spec"]["tasks"]:
        for container in task["template"]["spec"]["containers"]:
            container["env"] = [variable for variable in container["env"] if variable["name"] != SESSION]
    return renamed
