"""What a rank does so that others can see it when it cannot speak for itself, and so that it outlives nobody.

    ranks/rank00000.flight      the collectives that it entered and left, see `workbench.sharding.flight`
    ranks/rank00000.stack       the Python stacks of its threads, each time that it gets SIGUSR1
    ranks/rank00000.last.stack  the same, as it stood when it was told to stop (SIGTERM) or crashed (SIGABRT, SIGSEGV)

A stack is written by a signal handler in C, so it comes also from a rank that stands in a collective or an endless
loop. A rank that has no flight file has not called `be_watched`, and would die of SIGUSR1: nobody may send it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

from workbench.records.directory import RunDirectory
from workbench.sharding import flight

AGENT_PID = "WB_AGENT_PID"
"""Environment variable with the process that started the ranks, with which they leave; 0, or none, means to stay."""

_PR_SET_PDEATHSIG = 1


def be_watched(run: RunDirectory, rank: int) -> None:
    """Let others see which collective this rank is in and where it stands, and leave with the agent."""
    faulthandler.register(signal.SIGUSR1, file=_empty(stack_path(run, rank)))
    last = _empty(last_stack_path(run, rank))
    faulthandler.register(signal.SIGTERM, file=last, chain=True)
    faulthandler.enable(file=last)
    flight.start(flight_path(run, rank), rank)
    agent = int(os.environ.get(AGENT_PID, "0"))
    if agent:
        die_with(agent)


def flight_path(run: RunDirectory, rank: int) -> Path:
    """Where the collectives of a rank are."""
    return run.log_path(rank).with_suffix(".flight")


def stack_path(run: RunDirectory, rank: int) -> Path:
    """Where the stacks of a rank are."""
    return run.log_path(rank).with_suffix(".stack")


def last_stack_path(run: RunDirectory, rank: int) -> Path:
    """Where the stack that a rank ended with is."""
    return run.log_path(rank).with_suffix(".last.stack")


def _empty(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)


def die_with(parent_pid: int, *, poll_s: float = 0.5) -> None:
    """End this process as soon as its parent is gone, however that ended.

    Linux sees to it, also where Python has no say any more; a thread sees to it everywhere.

    Args:
        parent_pid: this process's parent; if it is another process already, the parent is gone.
        poll_s: how often the thread looks.
    """

    def look() -> None:
        while os.getppid() == parent_pid:
            time.sleep(poll_s)
        os._exit(128 + signal.SIGTERM)

    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=look, name="die-with-parent", daemon=True).start()
