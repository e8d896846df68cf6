"""A run whose job a cluster has started again: it resumes in the same directory, from its newest checkpoint."""

from __future__ import annotations

import time

from workbench.atomic import line_of, locked, read_lines, to_json, write_whole
from workbench.records.agents import files_of_agents
from workbench.records.directory import RunDirectory
from workbench.records.failures import EXIT_CODES, OOM, STOPPED, WAITING
from workbench.records.integrity import FIX
from workbench.records.progress import CONTINUES

REQUEUED = "requeued"
"""Key of a run's state: times (ns) at which its job was started again."""

STOPPED_AFTER = "stopped_after"
"""Key of a run's state: {"step": completed steps, "time_ns": ...} of its end by SIGTERM with a checkpoint."""

REOPENED = ("peer", "killed", "scheduler")
"""Causes of a failure that a requeued job resumes from: the job was ended; the run itself made no mistake."""


def reopen(run: RunDirectory) -> bool:
    """Prepare a run directory for a job that was started again; False if the run has ended and stays so.

    A run that was running is reopened, and one that failed because its job was ended (`REOPENED`). The records of that
    end are removed, and the step records after the newest checkpoint, because these steps are taken again.
    """
    failure = run.failure()
    with locked(run.path / ".state.lock"):
        state = run.state
        ended_by_job = state["state"] == "failed" and failure is not None and failure["cause"] in REOPENED
        if state["state"] != "running" and not ended_by_job:
            return state["state"] == "pending"
        ranks = run.path / "ranks"
        ends = [path for name in (EXIT_CODES, OOM, STOPPED, WAITING) for path in files_of_agents(run.path, name)]
        for path in (*ranks.glob("*.exit.json"), *ranks.glob("*.flight"), *ends):
            path.unlink(missing_ok=True)
        _keep_steps(run, state)
        for key in ("ended_ns", "rank0", "agent", STOPPED_AFTER):
            state.pop(key, None)
        state |= {"state": "running", REQUEUED: [*state.get(REQUEUED, ()), time.time_ns()]}
        write_whole(run.path / "state.json", to_json(state))
    return True


def _keep_steps(run: RunDirectory, state: dict[str, object]) -> None:
    """Keep the step records before the one at which the run resumes."""
    path = run.path / "metrics.jsonl"
    records = read_lines(path, fix=FIX)
    first = max(run.checkpoints(), default=0)
    if not first and "continues" in state:  # from the checkpoint of an earlier run, whose steps were copied
        first = next((record["step"] for record in records if CONTINUES in record), len(records))
    kept = [record for record in records if record["step"] < first]
    if len(kept) < len(records):
        write_whole(path, b"".join(map(line_of, kept)))
