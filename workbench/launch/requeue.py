"""A job that Slurm ends and starts again: its agent's side, on the node.

Slurm sets SLURM_JOB_ID in every job and SLURM_RESTART_COUNT in one that it has started again (`man sbatch`). A job is
submitted with --requeue if each of its runs saves checkpoints, see `workbench.launch.component`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.launch import slurm
from workbench.launch.nodes import this_node
from workbench.records.directory import RunDirectory
from workbench.records.requeued import STOPPED_AFTER, reopen
from workbench.train.preemption import GRACE, GRACE_S

_SAVING_S = 5  # more than the grace period: a rank that reached the end of its step writes its checkpoint


def shutdown_timeout_s() -> int:
    """Time from SIGTERM to SIGKILL that torch's agent gives the ranks: the grace period, and to write a checkpoint."""
    return math.ceil(float(os.environ.get(GRACE, GRACE_S))) + _SAVING_S


def reopen_runs(run_dirs: Sequence[Path]) -> None:
    """Reopen the runs of a job that Slurm has started again; only the first node's agent does."""
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) and this_node() == 0:
        for path in run_dirs:
            reopen(RunDirectory.open(path))


def request(run_dirs: Sequence[Path]) -> None:
    """Put this job back in Slurm's queue if it was preempted and a run has stopped with a checkpoint for it."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if not job_id or this_node():
        return
    try:
        stopped = [run for run in map(RunDirectory.open, run_dirs) if STOPPED_AFTER in run.state]
        if stopped and not any(run.cancel_requested for run in stopped):
            slurm.requeue_if_preempted(job_id)
    except WorkbenchError as error:  # the run then ends as preempted, and can be resumed
        sys.stderr.write(f"not requeued: {error}\n")
