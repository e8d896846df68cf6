"""Where the processes of a story are when nothing moves any more: what the kernel says of each, and its Python stacks.

The processes need ``PYTHONFAULTHANDLER=1`` in their environment: Python then writes the stacks of all threads on
SIGABRT, by a handler in C that works while the interpreter is blocked. It ends the process, so this is the last look.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

_WATCH_S = 1.0
"""Time in which the use of the processor is measured: a process that waits uses none, a slow one does."""

_WRITE_S = 3.0
"""Time that a process has to write its stacks."""

_LINES, _LINE = 60, 160
"""Of the stacks of one process, from the first, and characters of each."""


def last_look(processes: Sequence[psutil.Process], folder: Path) -> str:
    """Describe living processes, oldest first, and end them.

    All are stopped before the first is asked, so that none reacts to the end of another; the youngest is asked first,
    because some die with the process that started them.

    Args:
        processes: of the story.
        folder: where some of them write their stacks; the others write to their standard error.
    """
    before = {process.pid: _seconds(process) for process in processes}
    time.sleep(_WATCH_S)
    texts = {process.pid: _describe(process, before[process.pid]) for process in processes}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.suspend()
    by_age = sorted(processes, key=_born)
    for process in reversed(by_age):
        texts[process.pid] += f"\n{_stacks(process, folder)}"
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return "\n".join([f"load of the machine {load}", *(texts[process.pid] for process in by_age)])


def _describe(process: psutil.Process, before_s: float) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        waits_in = Path(f"/proc/{process.pid}/wchan").read_text(encoding="utf8") or "?"
        return (
            f"{process.pid}, child of {process.ppid()}, {process.status()} in {waits_in}, "
            f"used {_seconds(process) - before_s:.2f} s of {_WATCH_S:g} s: {' '.join(process.cmdline())[:_LINE]}"
        )
    return f"{process.pid} ended meanwhile"


def _stacks(process: psutil.Process, folder: Path) -> str:
    """The stacks that a stopped process writes when it is ended with SIGABRT."""
    files = [Path(f"/proc/{process.pid}/fd/2"), *folder.rglob("*.stack")]
    with contextlib.ExitStack() as stack, contextlib.suppress(psutil.Error, OSError):
        opened = [stack.enter_context(file.open("rb")) for file in files if file.is_file()]
        for file in opened:
            file.seek(0, os.SEEK_END)
        resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        process.send_signal(signal.SIGABRT)
        process.resume()
        _until_gone(process)
        text = b"".join(file.read() for file in opened).decode(errors="replace")
        lines = [line[:_LINE] for line in text.splitlines() if line.strip()]
        return "\n".join(f"    {line}" for line in _without_modules(lines)[:_LINES]) or "    it wrote no stack"
    return "    its standard error is no file"


def _until_gone(process: psutil.Process) -> None:
    """Wait for the end of a process without taking its exit code, which belongs to its parent."""
    deadline = time.monotonic() + _WRITE_S
    with contextlib.suppress(psutil.Error):
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.02)


def _without_modules(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not line.startswith("Extension modules:")]


def _seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _born(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return float(process.create_time())
    return 0.0
