"""Exits of ranks: the record of each, its cause, and the root cause of a run's failure."""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Mapping
from typing import Any

from workbench.records.provenance import without_machine_paths

CAUSES = ("exception", "out of memory", "killed", "hang", "early exit", "start", "scheduler", "peer")
"""Causes of a rank's failure; `early exit` is exit code 0 while others waited, `peer` the echo of another rank's end,
`start` a job that never came up, `scheduler` one that a cluster ended: a time limit, a preemption, a node."""

RECORDED_LAST = ("hang", "early exit")
"""Causes by which a job's other ranks die first: the record of the rank itself is written after theirs."""

EXIT_CODES = "ranks/exit_codes.json"
"""{rank: exit code, or -signal}, in the order in which they ended, in the run directory."""

OOM = "ranks/oom.json"
"""Processes that the machine killed for memory while the job ran, in the run directory.

This file, the one before and the two that follow are written by each agent (`workbench.records.agents`).
"""

WAITING = "ranks/waiting.json"
"""Ranks that others wait for, in the run directory; see `workbench.launch.watchdog`."""

STOPPED = "ranks/stopped.json"
"""{rank: ns, when it was first seen stopped}, without those that continued; see `workbench.launch.watchdog`."""

_PEER_EXCEPTIONS = (
    "DistNetworkError",
    "DistBackendError",
    "ConnectionError",
    "ConnectionResetError",
    "BrokenPipeError",
)
_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "connection was likely closed",
    "timed out waiting",
    "watchdog caught collective",
    "remote process exited",
    "nccl communicator was aborted",
)
_MEMORY_EXCEPTIONS = ("OutOfMemoryError", "MemoryError")
_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory")


def exit_record(
    rank: int | None,
    coordinates: Mapping[str, int],
    error: BaseException | None,
    *,
    cause: str | None = None,
    waited_in: str = "",
    stack: str = "",
) -> dict[str, Any]:
    """Build the record of a rank's exit; see `RunDirectory.write_exit`."""
    record: dict[str, Any] = {
        "rank": rank,
        "coordinates": dict(coordinates),
        "time_ns": time.time_ns(),
        "ok": error is None,
        "cause": None,
        "exception": None,
        "message": "",
        "traceback": "",
        "waited_in": waited_in,
        "stack": without_machine_paths(stack),
    }
    if error is not None:
        record |= {
            "cause": cause or cause_of(error),
            "exception": type(error).__name__,
            "message": without_machine_paths(str(error)),
            "traceback": without_machine_paths("".join(traceback.format_exception(error))),
        }
    return record


def root_cause(records: Collection[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Root cause among exit records: the first rank that failed by itself; see `RunDirectory.failure`."""
    failed = [record for record in records if not record["ok"]]
    if not failed:
        return None
    first = min(
        failed,
        key=lambda record: (record["cause"] == "peer", record["cause"] not in RECORDED_LAST, record["time_ns"]),
    )
    others = [record for record in failed if record is not first]
    return {
        **first,
        "also_failed": [record["rank"] for record in others],
        "also": {record["rank"]: record["waited_in"] for record in others if record["waited_in"]},
    }


def failure_summary(failure: Mapping[str, Any]) -> str:
    r"""One-line summary of a failure: rank, exception, and the requested and found parts of its message.

    Example:
        >>> failure_summary({"rank": 1, "exception": "ShapeError", "message": "split 7 tokens\n  found: an odd row"})
        'rank 1 ShapeError: split 7 tokens; found: an odd row'
    """
    lines = str(failure.get("message", "")).splitlines()
    parts = [*lines[:1], *(line.strip() for line in lines[1:] if line.startswith("  found: "))][:2]
    rank = "" if failure.get("rank") is None else f"rank {failure['rank']} "
    named = ("out of memory", "killed", "scheduler", *RECORDED_LAST)
    cause = f" ({failure['cause']})" if failure.get("cause") in named else ""
    return f"{rank}{failure.get('exception', 'failed')}{cause}" + (f": {'; '.join(parts)}" if parts else "")


def cause_of(error: BaseException) -> str:
    """Cause of a rank's failure, from its exception: "out of memory", "peer" or "exception"."""
    if _is_one_of(error, _MEMORY_EXCEPTIONS, _MEMORY_MESSAGES):
        return "out of memory"
    return "peer" if is_connection_error(error) else "exception"


def is_connection_error(error: BaseException) -> bool:
    """True if an exception is the echo of a peer's death and not a failure of its own.

    The innermost exception of the chain decides: a lost connection is recognised inside another error, and one
    during the cleanup after a real failure does not hide that failure.
    """
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    return _is_one_of(error, _PEER_EXCEPTIONS, _PEER_MESSAGES)


def _is_one_of(error: BaseException, exceptions: Collection[str], messages: Collection[str]) -> bool:
    kinds, text = {kind.__name__ for kind in type(error).__mro__}, str(error).lower()
    return bool(kinds.intersection(exceptions)) or any(message in text for message in messages)


def error_lines(output: str, count: int = 8) -> str:
    r"""Return the last lines of a program's output; an exception before its traceback, since a summary has one line.

    Example:
        >>> error_lines("Traceback (most recent call last):\n  File ...\nImportError: no torch\n").splitlines()[0]
        'ImportError: no torch'
    """
    lines = [line for line in output.splitlines() if line.strip()]
    traced = max((number for number, line in enumerate(lines) if line.startswith("Traceback (")), default=len(lines))
    raised = [line for line in lines[traced + 1 :] if not line.startswith(" ")][:1]
    return "\n".join([*raised, *(line for line in lines[-count:] if line not in raised)])
