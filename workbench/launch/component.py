"""The torchx job of one run: the same description for every scheduler.

torchx's own `dist.ddp` starts `bash -c torchrun` from PATH, which is not there in a kernel whose environment
was not activated. This one starts the running interpreter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import workbench
from workbench.launch.devices import Placement

if TYPE_CHECKING:
    from torchx.specs import AppDef

WORKER = "workbench.train.worker"
"""The module that every rank runs."""

MEMORY_MB = {"cpu": 4096, "cuda": 16384}
"""Memory of the host that a cluster is asked for, for each rank, unless somebody says otherwise."""


@dataclass(frozen=True)
class Cluster:
    """What a job needs to know about a machine that is not this one.

    Attributes:
        python: the interpreter there.
        memory_mb: memory of the host for each rank; None takes `MEMORY_MB`, 0 asks for none.
        image: the container image; "" where nothing runs in containers.
        mounts: what is mounted into the container, as torchx's `parse_mounts` reads it.
    """

    python: str = "python"
    memory_mb: int | None = None
    image: str = ""
    mounts: Sequence[str] = field(default=())


def run_job(
    name: str,
    run_path: Path,
    world_size: int,
    placement: Placement,
    *,
    project: Path,
    worker: str = WORKER,
    cluster: Cluster | None = None,
) -> AppDef:
    """Describe the job that executes one run directory.

    Args:
        name: of the run.
        run_path: its run directory.
        world_size: ranks, all on one node.
        placement: device of the ranks.
        project: folder that relative paths in the spec begin at.
        worker: module that every rank runs.
        cluster: None for a job on this machine, which is a child of this process and ends when it does. On a cluster
            the job outlives us, the interpreter is the cluster's, and GPUs are the scheduler's to give; run directory
            and project have the same paths there as here, on a shared file system.
    """
    from torchx import specs

    environment = environment_of(run_path, placement)
    if cluster is None:
        environment["WB_PARENT_PID"] = str(os.getpid())
    else:
        environment = {key: value for key, value in environment.items() if not key.startswith("CUDA_")}
    arguments = [
        "-m",
        "workbench.launch.agent",
        "--standalone",
        "--nnodes=1",
        f"--nproc-per-node={world_size}",
        "--max-restarts=0",
        "-m",
        worker,
        str(run_path.resolve()),
        "--project",
        str(project.resolve()),
    ]
    there = cluster or Cluster(python=sys.executable)
    memory_mb = MEMORY_MB[placement.device] if there.memory_mb is None else there.memory_mb
    role = specs.Role(
        name="trainer",
        image=there.image,
        entrypoint=there.python,
        args=arguments,
        env=environment,
        num_replicas=1,
        mounts=specs.parse_mounts(list(there.mounts)) if there.mounts else [],
        # on this machine we give out GPUs ourselves: torchx would begin at device 0 for every job
        resource=specs.Resource(
            cpu=world_size, memMB=memory_mb * world_size, gpu=len(placement.gpus) if cluster else 0
        ),
    )
    return specs.AppDef(name=name, roles=[role])


def environment_of(run_path: Path, placement: Placement) -> dict[str, str]:
    """What the processes of a run find in their environment, whoever starts them on this machine."""
    environment = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores, and sums keep one order
        "WORKBENCH_DEVICE": placement.device,
        "WB_RUN_DIR": str(run_path.resolve()),
        "PYTHONPATH": _python_path(),
    }
    if placement.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.gpus)
        environment["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # nvidia-smi's, as our ids
    return environment


def _python_path() -> str:
    """PYTHONPATH of the ranks: this source tree first, so that nothing needs to be installed."""
    here = str(Path(workbench.__file__).resolve().parent.parent)
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != here]
    return os.pathsep.join([here, *rest])
