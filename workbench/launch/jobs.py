"""torchx jobs on this machine: start one, ask how it is, cancel it.

The only module that talks to a torchx runner. What it works around: a runner made on the main thread replaces
the signal handlers of a notebook kernel; every question about a finished job signals its old process group,
which may be someone else's by then; a job is a zombie until somebody asks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import LaunchError

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDef

_SCHEDULER = "local_cwd"


class Job:
    """A job that was started.

    Attributes:
        handle: torchx's name for it.
    """

    def __init__(self, handle: str) -> None:
        self.handle = handle
        self._ended: str | None = None

    def poll(self) -> str:
        """How it is now: running, succeeded, failed or cancelled.

        torchx is never asked again after the end.
        """
        if self._ended is None:
            status = _runner().status(self.handle)
            if status is None:
                self._end("failed")
            elif status.is_terminal():
                self._end(status.state.name.lower())
        return self._ended or "running"

    def cancel(self) -> None:
        """Stop all its processes; nothing if it has ended."""
        if self.poll() == "running":
            _runner().cancel(self.handle)
            self._end("cancelled")

    def _end(self, state: str) -> None:
        self._ended = state
        # A deleted scheduler signals the process groups of all jobs that it remembers, ended ones too.
        with contextlib.suppress(Exception):
            _runner()._scheduler(_SCHEDULER)._apps.pop(self.handle.rsplit("/", 1)[-1], None)


def submit(app: AppDef, log_dir: Path) -> Job:
    """Start a job as child processes of this one.

    Args:
        app: what to run.
        log_dir: where torchx writes the output of the agent.

    Raises:
        LaunchError: it could not be started.
    """
    try:
        return Job(_runner().run(app, _SCHEDULER, cfg={"log_dir": str(log_dir)}))
    except Exception as error:
        raise LaunchError(f"start job {app.name}", found=f"{type(error).__name__}: {error}",
                          rule="torchx starts the job's agent as a child process",
                          fix="check memory, process limits and space in the run directory") from error


def agent_output(log_dir: Path) -> str:
    """What the agents of the jobs under this folder wrote to standard error."""
    files = sorted(log_dir.glob("*/*/trainer/0/stderr.log"))
    return "\n".join(file.read_text(encoding="utf8", errors="replace") for file in files)


@functools.cache
def _runner() -> Runner:
    """One runner a process, made in a thread that ends at once, so that no signal handler is replaced."""
    made: list[Runner] = []
    failed: list[BaseException] = []

    def make() -> None:
        try:
            from torchx.runner import get_runner

            runner = get_runner()
            runner.scheduler_run_opts(_SCHEDULER)  # makes the scheduler, which installs the handlers
            made.append(runner)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
