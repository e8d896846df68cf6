"""A worker without a model, for tests of launching: records steps, and fails on request.

What goes wrong is said by names in ``faults`` that only this worker knows: ``raise_on_1`` raises on rank 1,
``kill_1`` kills rank 1 with SIGKILL, ``raise_here`` raises in this process. Several ranks meet in a gloo
collective every step, so that the others feel the death of one as a lost connection.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from workbench.records.directory import RunDirectory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--project", type=Path, required=True)
    arguments = parser.parse_args()
    for path in arguments.runs:
        _run(RunDirectory.open(path), int(os.environ["RANK"]))


def _run(run: RunDirectory, rank: int) -> None:
    with run.log_path(rank).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        _train(run, rank, int(os.environ["WORLD_SIZE"]))
    except Exception as error:
        run.write_exit(rank, {"cp": rank}, error)
        if rank == 0:
            run.set_state("failed")
        sys.exit(1)
    run.write_exit(rank, {"cp": rank}, None)
    if rank == 0:
        run.set_state("succeeded")


def _train(run: RunDirectory, rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    from workbench.sharding.mesh import join, leave

    join("cpu", timeout_s=60.0, name=run.path.name)
    if rank == 0:
        run.set_state("running")
    for step in range(run.spec.steps):
        if rank == 1 and step == 1 and "raise_on_1" in run.spec.faults:
            raise ValueError("the second rank had enough")
        if rank == 1 and step == 1 and "kill_1" in run.spec.faults:
            sys.stdout.write("about to go\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(())
        if world_size > 1:
            dist.all_reduce(total)
        if rank == 0:
            run.append_step({"step": step, "ranks/all/sum": total.item(), "device": os.environ["WORKBENCH_DEVICE"]})
    leave()


def run_here(run: RunDirectory, project: Path) -> None:
    """One rank, in this process."""
    run.set_state("running")
    if "raise_here" in run.spec.faults:
        raise ValueError(f"no good in {project.name}")
    for step in range(run.spec.steps):
        run.append_step({"step": step, "device": os.environ["WORKBENCH_DEVICE"]})
    run.write_exit(0, {}, None)
    run.set_state("succeeded")


if __name__ == "__main__":
    main()
