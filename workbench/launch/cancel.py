"""End a run from any process: the notebook that launched it, another terminal, or after the launcher is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from workbench.launch import jobs
from workbench.launch.failure_analysis import record_end
from workbench.records.directory import RunDirectory
from workbench.records.provenance import is_of_this_machine, is_process_alive
from workbench.records.states import CLUSTERS, ENDED

_GRACE_S = 10.0  # time between SIGTERM and SIGKILL


def cancel_run(run: RunDirectory, *, by: str = "the command line", wait_s: float = 30.0) -> str:
    """Request the end of a run and wait for it.

    The launcher of the run ends it, if that process is alive. Otherwise its processes are stopped from here, by pid and
    start time, never by name, and on a cluster the scheduler is asked. `by` is the origin of the request, for the
    record; `wait_s` is longer than ranks take to stop.

    Returns:
        The resulting state: cancelled; another if it ended before; pending or running if it has not ended in time.
    """
    if run.state["state"] in ENDED:
        return run.status
    run.request_cancel(by)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        state = run.state
        if state["state"] in ENDED:
            return run.status
        launcher = state.get("launcher")
        # a launcher on another machine cannot be checked: there the cluster is asked
        if not launcher or not is_process_alive(launcher) or (_handle(state) and not is_of_this_machine(launcher)):
            return _end_without_launcher(run)
        time.sleep(0.1)
    return run.status


def cancel_runs(
    runs: Sequence[RunDirectory],
    *,
    by: str = "the command line",
    on_end: Callable[[RunDirectory, str, bool], None] | None = None,
) -> list[str]:
    """Cancel runs that have not ended as `cancel_run` does, and return the final state of each.

    `on_end` is called with each run, its state, and True if it had ended before.
    """
    # the recorded state, not `status`: a run that looks lost from here may still wait in a cluster's queue
    ended = [run.state["state"] in ENDED for run in runs]
    for run, had_ended in zip(runs, ended, strict=True):
        if not had_ended:
            run.request_cancel(by)  # all of them first, so that none is started while another is waited for
    states = []
    for run, had_ended in zip(runs, ended, strict=True):
        states.append(run.status if had_ended else cancel_run(run, by=by))
        if on_end:
            on_end(run, states[-1], had_ended)
    return states


def _handle(state: dict[str, Any]) -> str:
    """A cluster's name for the job; "" on this machine."""
    return str(state.get("handle") or "") if state.get("backend") in CLUSTERS else ""


def _end_without_launcher(run: RunDirectory) -> str:
    state = run.state
    if handle := _handle(state):
        others = _waiting_in(handle, run)
        if others and run.set_state("cancelled", unless="running") == "cancelled":
            return "cancelled"  # the job's ranks skip it
        jobs.job_of(handle).cancel()
        for other in others:  # the job would have executed them; `workbench run` gives them another one
            other.set_state("cancelled")
    for process in (state[role] for role in ("agent", "rank0") if role in state):
        if is_of_this_machine(process) and is_process_alive(process):
            _stop(process["pid"])
    return record_end(run, "cancelled")


def _waiting_in(handle: str, run: RunDirectory) -> list[RunDirectory]:
    """Other runs of a job that have not ended."""
    found = [
        RunDirectory.open(path.parent) for path in run.path.parent.glob("*/config.json") if path.parent != run.path
    ]
    return [other for other in found if other.state.get("handle") == handle and other.state["state"] not in ENDED]


def _stop(pid: int) -> None:
    """Send SIGTERM to a process, then SIGKILL to it and its children if they are still alive."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        process.terminate()
        for survivor in psutil.wait_procs(family, timeout=_GRACE_S)[1]:
            with contextlib.suppress(psutil.Error):
                survivor.kill()
