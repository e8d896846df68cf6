"""The state of a run: its file, the states that there are, and which of them its processes leave possible.

state.json is read once for each look at a run; what follows from it is computed from that content, so that a list of
many runs opens as few files as it has facts to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.atomic import read_json
from workbench.errors import RecordError
from workbench.records.damage import STATE_TYPES, check_types, unfit
from workbench.records.provenance import is_process_alive

STATES = ("pending", "running", "succeeded", "failed", "cancelled", "lost")
"""States of a run. `lost` is a run that waits or runs although no process is left that could start or end it."""

ENDED = ("succeeded", "failed", "cancelled", "lost")
"""The states that a run does not leave, see `workbench.records.directory.RunDirectory.set_state`."""

CLUSTERS = ("slurm", "sbatch", "kubernetes")
"""Backends whose jobs outlive the process that submitted them."""

CORRECTIONS = (("succeeded", "failed"), ("failed", "cancelled"))
"""Changes of an ended state that are allowed: its first writer cannot know of the other ranks or of a request."""


def read_state(run: Path) -> dict[str, Any]:
    """Return the content of state.json of a run directory.

    Units: keys ending in ``_ns`` count nanoseconds since 1970; ``create_time`` is psutil's, in seconds.

    Raises:
        RecordError: it is missing, damaged, or has no state.
    """
    path = run / "state.json"
    state = read_run_json(path, what="a run directory")
    if not (isinstance(state, dict) and state.get("state") in list(STATES) and isinstance(state.get("name"), str)):
        raise unfit(path, state, f"a mapping with a name and a state, one of {', '.join(STATES)}")
    check_types(path, state, STATE_TYPES)
    return state


def status_in(state: Mapping[str, Any]) -> str:
    """Return the state of a run in one word; `lost` if no process is left that could start or end it.

    A run of another machine cannot be checked from here and keeps its recorded state; so does a job in the queue of
    a cluster, which needs no launcher.

    Args:
        state: as `read_state` returns it.

    Example:
        >>> status_in({"state": "pending", "backend": "slurm", "handle": "slurm://here/7"})
        'pending'
    """
    if state["state"] not in ("pending", "running"):
        return str(state["state"])
    if state["state"] == "pending" and "handle" in state and state.get("backend") in CLUSTERS:
        return "pending"
    processes = [state[role] for role in ("rank0", "agent", "launcher") if role in state]
    return str(state["state"]) if not processes or any(map(is_process_alive, processes)) else "lost"


def read_run_json(path: Path, *, what: str) -> Any:
    """Return the content of a JSON file that every directory of this kind has.

    Raises:
        RecordError: it is missing or damaged.
    """
    try:
        return read_json(
            path, requested=f"read {path}", fix="it was damaged after it was written; run the configuration again"
        )
    except FileNotFoundError:
        raise RecordError(
            f"read {path}",
            found="no such file",
            rule=f"{what} has {path.name}",
            fix="check the path, or run the configuration again",
        ) from None
