"""The torchx job of one run: the same description for every scheduler.

torchx's own `dist.ddp` starts `bash -c torchrun` from PATH, which is missing in a kernel whose environment was
not activated. This one starts the running interpreter.
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
"""Host memory requested from a cluster for each rank, by default."""


@dataclass(frozen=True)
class Cluster:
    """Settings of a job on another machine.

    Attributes:
        python: the interpreter there.
        memory_mb: host memory for each rank; None takes `MEMORY_MB`, 0 requests none.
        image: the container image; "" without containers.
        mounts: mounts of the container, as torchx's `parse_mounts` reads them.
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
    """Build the job that executes one run directory.

    Args:
        name: of the run.
        run_path: its run directory.
        world_size: ranks, all on one node.
        placement: device of the ranks.
        project: folder that paths in the spec are relative to.
        worker: module that every rank runs.
        cluster: None for a job on this machine, which is a child of this process and ends with it. On a cluster
            the job outlives this process, the interpreter is the cluster's, and the scheduler assigns GPUs; run
            directory and project have the same paths there as here, on a shared file system.
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
    target = cluster or Cluster(python=sys.executable)
    memory_mb = MEMORY_MB[placement.device] if target.memory_mb is None else target.memory_mb
    role = specs.Role(
        name="trainer",
        image=target.image,
        entrypoint=target.python,
        args=arguments,
        env=environment,
        num_replicas=1,
        mounts=specs.parse_mounts(list(target.mounts)) if target.mounts else [],
        # on this machine `slots` assigns GPUs: torchx would start at device 0 for every job
        resource=specs.Resource(
            cpu=world_size, memMB=memory_mb * world_size, gpu=len(placement.gpus) if cluster else 0
        ),
    )
    return specs.AppDef(name=name, roles=[role])


def environment_of(run_path: Path, placement: Placement) -> dict[str, str]:
    """Environment variables of a run's processes, for every way to start them on this machine."""
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
    """PYTHONPATH of the ranks: this source tree first, so that it need not be installed."""
    here = str(Path(workbench.__file__).resolve().parent.parent)
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != here]
    return os.pathsep.join([here, *rest])
