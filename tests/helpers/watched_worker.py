"""A worker without a model whose ranks run the workbench's own collectives and fail on command.

In step 2 rank 1 does what ``faults`` says: ``skip`` leaves out a collective (the next one is of another kind, so that
gloo lets both ranks wait for ever rather than abort one), ``spin`` loops outside of all collectives for ever, ``kill``
kills itself with SIGKILL, ``memory`` runs out of it, ``leave`` ends with exit code 0. ``slow`` makes
every step of every rank take half a second.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from workbench.records.directory import RunDirectory
from workbench.sharding import flight
from workbench.sharding.collectives import all_gather, all_sum
from workbench.sharding.mesh import join, make_mesh
from workbench.train.watched import enable_diagnostics


def main() -> None:
    run, rank = RunDirectory.open(Path(sys.argv[1])), int(os.environ["RANK"])
    with run.log_path(rank).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        enable_diagnostics(run, rank)
        train(run, rank)
    except Exception as error:
        run.write_exit(rank, {"cp": rank}, error, waited_in=flight.waiting_in())
        os._exit(1)
    run.write_exit(rank, {"cp": rank}, None)
    if rank == 0:
        run.set_state("succeeded")
    flight.stop()
    os._exit(0)


def train(run: RunDirectory, rank: int) -> None:
    if rank == 0:
        run.set_state("running")
    device = join(os.environ.get("WORKBENCH_DEVICE", "cpu"), timeout_s=run.spec.timeout_s)
    axis, ones = make_mesh(cp=run.spec.layout.cp, device=device)["cp"], torch.ones(4, device=device)
    for step in range(run.spec.steps):
        all_sum(ones, axis)
        if not ((rank, step) == (1, 2) and go_wrong(run.spec.faults)):
            all_gather(ones, axis)
        all_sum(ones, axis)
        if "slow" in run.spec.faults:
            time.sleep(0.5)
        if rank == 0:
            run.append_step({"step": step})


def go_wrong(faults: tuple[str, ...]) -> bool:
    """Run the requested fault, and return whether to skip the next collective."""
    if "kill" in faults:
        os.kill(os.getpid(), signal.SIGKILL)
    if "leave" in faults:
        os._exit(0)
    if "memory" in faults:
        raise MemoryError("no room for the batch")
    if "spin" in faults:
        spin()
    return "skip" in faults


def spin() -> None:
    while True:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
