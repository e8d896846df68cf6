"""End a run from any process: the notebook that launched it, another terminal, or after the launcher has gone."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psutil

from workbench.launch import jobs
from workbench.launch.deaths import settle
from workbench.records.directory import CLUSTERS, ENDED, RunDirectory, is_of_this_machine, process_lives

_GRACE_S = 10.0


def cancel_run(run: RunDirectory, *, by: str = "the command line", wait_s: float = 30.0) -> str:
    """Ask for the end of a run and see to it.

    Whoever launched the run ends it, if that process lives. Otherwise its processes are stopped from here, by pid and
    start time, never by name, and on a cluster the scheduler is asked.

    Args:
        run: what to end.
        by: who asks, for the record.
        wait_s: how long to wait for the end; longer than ranks take to leave.

    Returns:
        The state that stands: cancelled; another if it ended before; pending or running if it has not ended in time.
    """
    if run.state["state"] in ENDED:
        return run.status
    run.request_cancel(by)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        state = run.state
        if state["state"] in ENDED:
            return run.status
        if not ("launcher" in state and process_lives(state["launcher"])) or _left_to_a_cluster(state):
            return _end_without_launcher(run)
        time.sleep(0.1)
    return run.status


def _left_to_a_cluster(state: dict[str, Any]) -> bool:
    """Whether only the cluster can be asked: a launcher on another machine may have gone, and nobody here can look."""
    return (
        state.get("backend") in CLUSTERS
        and bool(state.get("handle"))
        and not is_of_this_machine(state.get("launcher", {}))
    )


def _end_without_launcher(run: RunDirectory) -> str:
    state = run.state
    if state.get("backend") in CLUSTERS and state.get("handle"):
        jobs.job_of(state["handle"]).cancel()
    for process in (state[who] for who in ("agent", "rank0") if who in state):
        if is_of_this_machine(process) and process_lives(process):
            _stop(process["pid"])
    return settle(run, "cancelled")


def _stop(pid: int) -> None:
    """SIGTERM to a process, and SIGKILL to what is left of it and its children."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        process.terminate()
        for left in psutil.wait_procs(family, timeout=_GRACE_S)[1]:
            with contextlib.suppress(psutil.Error):
                left.kill()
