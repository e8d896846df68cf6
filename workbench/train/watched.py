"""Diagnostics of a rank that hangs or crashes, and its exit together with its agent.

    ranks/rank00000.flight      the collectives that it entered and left, see `workbench.sharding.flight`
    ranks/rank00000.stack       the Python stacks of its threads, each time that it gets SIGUSR1
    ranks/rank00000.last.stack  the same, when it was stopped (SIGTERM) or crashed (SIGABRT, SIGSEGV)

Stacks are written by a signal handler in C, so a rank that blocks in a collective or an endless loop writes them too.
Do not send SIGUSR1 to a rank without a flight file: it has not called `be_watched` and would die of the signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from workbench.sharding import flight

if TYPE_CHECKING:
    from workbench.records.directory import RunDirectory

AGENT_PID = "WB_AGENT_PID"
"""Environment variable with the pid of the agent, with which ranks exit; 0 or unset: ranks outlive it."""

SignalHandler = Callable[[int, FrameType | None], object] | signal.Handlers
"""A handler of signals in Python, or the kernel's own."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_open: list[int] = []  # files that signal handlers write to


def enable_diagnostics(run: RunDirectory, rank: int, *, on_sigterm: SignalHandler = signal.SIG_DFL) -> None:
    """Start the flight recorder and the stack dumps of this rank in a run, and exit with the agent.

    At the next run of the same process they go on in its directory. `on_sigterm` handles the signal after the stack is
    written; by default the rank dies of it.
    """
    before = list(_open)
    stack, last = _empty(stack_path(run, rank)), _empty(last_stack_path(run, rank))
    faulthandler.register(signal.SIGUSR1, file=stack)
    faulthandler.unregister(signal.SIGTERM)  # chained once, to the handler of this run
    signal.signal(signal.SIGTERM, on_sigterm)
    faulthandler.register(signal.SIGTERM, file=last, chain=True)
    faulthandler.enable(file=last)
    _open[:] = [stack, last]
    for file in before:
        os.close(file)
    flight.start(flight_path(run, rank), rank)
    agent = int(os.environ.get(AGENT_PID, "0"))
    if agent and not before:
        die_with(agent)


def flight_path(run: RunDirectory, rank: int) -> Path:
    """Path of a rank's flight record."""
    return run.log_path(rank).with_suffix(".flight")


def stack_path(run: RunDirectory, rank: int) -> Path:
    """Path of a rank's stacks on SIGUSR1."""
    return run.log_path(rank).with_suffix(".stack")


def last_stack_path(run: RunDirectory, rank: int) -> Path:
    """Path of a rank's last stack, from SIGTERM or a crash."""
    return run.log_path(rank).with_suffix(".last.stack")


def _empty(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)


def die_with(parent_pid: int, *, poll_s: float = 0.5) -> None:
    """Kill this process as soon as its parent has exited, for whatever reason.

    On Linux the kernel does it, even while Python is blocked; a polling thread covers every platform. If the parent is
    another process already, it has exited.
    """

    def poll() -> None:
        while os.getppid() == parent_pid:
            time.sleep(poll_s)
        os._exit(128 + signal.SIGTERM)

    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=poll, name="die-with-parent", daemon=True).start()
