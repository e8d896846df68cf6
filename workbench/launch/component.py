"""The torchx job of one run: the same description for every scheduler.

torchx's own `dist.ddp` starts `bash -c torchrun` from PATH, which is not there in a kernel whose environment
was not activated. This one starts the running interpreter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import workbench
from workbench.launch.devices import Placement

if TYPE_CHECKING:
    from torchx.specs import AppDef

WORKER = "workbench.runs.worker"
"""The module that every rank runs."""


def run_job(name: str, run_path: Path, world_size: int, placement: Placement, *, project: Path,
            worker: str = WORKER, local: bool = True) -> AppDef:
    """Describe the job that executes one run directory.

    Args:
        name: of the run.
        run_path: its run directory.
        world_size: ranks, all on one node.
        placement: device of the ranks.
        project: folder that relative paths in the spec begin at.
        worker: module that every rank runs.
        local: the job runs on this machine, as a child of this process, and ends when this process does. For
            a cluster's scheduler say False: there the job outlives us, `python` is the container's, and GPUs
            are the scheduler's to give.
    """
    from torchx import specs

    environment = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores, and sums keep one order
        "WORKBENCH_DEVICE": placement.device,
        "PYTHONPATH": _python_path(),
    }
    if local:
        environment["WB_PARENT_PID"] = str(os.getpid())
        if placement.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(placement.gpus)
    arguments = ["-m", "workbench.launch.agent", "--standalone", "--nnodes=1",
                 f"--nproc-per-node={world_size}", "--max-restarts=0",
                 "-m", worker, str(run_path.resolve()), "--project", str(project.resolve())]
    role = specs.Role(
        name="trainer", image="", entrypoint=sys.executable if local else "python", args=arguments,
        env=environment, num_replicas=1,
        # locally we give out GPUs ourselves: torchx would begin at device 0 for every job
        resource=specs.Resource(cpu=world_size, memMB=1024 * world_size,
                                gpu=0 if local else len(placement.gpus)))
    return specs.AppDef(name=name, roles=[role])


def _python_path() -> str:
    """PYTHONPATH of the ranks: this source tree first, so that nothing needs to be installed."""
    here = str(Path(workbench.__file__).resolve().parent.parent)
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != here]
    return os.pathsep.join([here, *rest])
