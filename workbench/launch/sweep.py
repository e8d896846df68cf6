"""A sweep: the runs of an ablation, started and watched by a thread, with all records on disk.

`launch` returns a `Sweep` at once. A daemon thread starts runs as devices become free, watches them, and records in
every run directory how its run ended. If this process ends for any reason, nothing is lost: the jobs end with it, the
records stay, and launching the same again starts only the missing runs.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from workbench.errors import LaunchError, RecordError, WorkbenchError
from workbench.launch.devices import Placement
from workbench.launch.failure_analysis import record_end
from workbench.launch.jobs import Job
from workbench.launch.task import RunEvent, Task
from workbench.records.directory import ENDED, RunDirectory
from workbench.records.failures import failure_summary
from workbench.records.progress import steps_recorded

_POLL_S = 0.1
_GRACE_S = 20.0  # time that the watching thread has to end its jobs when the interpreter ends

Starter = Callable[[RunDirectory, int, Placement], Job]
"""Starts a run, given its directory, number of ranks and placement."""


class Sweep:
    """Launched runs. It is created by `workbench.launch.run.launch`.

    Attributes:
        runs: the run directories, in the order of the ablation.
        planned: the planned runs, in the same order.
        experiment_dir: the parent of their ``runs`` folder.

    Example:
        >>> sweep = launch(ablation, experiment_dir)   # doctest: +SKIP
        >>> sweep.states()                             # doctest: +SKIP
        {'one_rank': 'succeeded', 'cp2_zigzag': 'running'}
        >>> sweep.cancel("cp2_zigzag")                 # doctest: +SKIP
    """

    def __init__(
        self, tasks: Sequence[Task], experiment_dir: Path, *, on_event: Callable[[RunEvent], None] | None = None
    ) -> None:
        self.experiment_dir = experiment_dir
        self.runs = [task.run for task in tasks]
        self.planned = [task.plan for task in tasks]
        self._tasks = list(tasks)
        self._on_event = on_event or (lambda event: None)
        self._events: queue.SimpleQueue[RunEvent | None] = queue.SimpleQueue()
        self._ended, self._jobs_outlive_us = 0, False
        self._stop, self._finished = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    # ---- public API ----------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """True if every run has ended."""
        return self._finished.is_set()

    def states(self) -> dict[str, str]:
        """The state of every run, by name; `lost` if its directory is gone."""
        return {plan.name: _status(run) for plan, run in zip(self.planned, self.runs, strict=True)}

    def wait(self, timeout_s: float | None = None) -> Sweep:
        """Wait until every run has ended. An interrupt (Ctrl-C) leaves the runs running.

        Raises:
            LaunchError: the time is over and runs have not ended.
        """
        if not self._finished.wait(timeout_s):
            running = [name for name, state in self.states().items() if state not in ENDED]
            raise LaunchError(
                f"wait {timeout_s:g} s for {self.experiment_dir.name}",
                found=", ".join(running),
                rule="every run has ended",
                fix="wait longer, or cancel()",
            )
        if self._error is not None:
            raise self._error
        return self

    def follow(self, on_event: Callable[[RunEvent], None]) -> Sweep:
        """Wait until every run has ended, and call back with every event meanwhile, on this thread.

        Each event is delivered once: another call, after an interruption or the end, gets only the remaining ones.
        """
        while (event := self._events.get()) is not None:
            on_event(event)
        self._events.put(None)  # for further callers
        return self.wait()

    def cancel(self, *names: str) -> None:
        """Request the end of runs, of all if none is named; returns before they have ended.

        A waiting run never starts; a run that has ended stays as it is.

        Raises:
            LaunchError: a name that is not in the sweep; then nothing is cancelled.
        """
        known = {plan.name: run for plan, run in zip(self.planned, self.runs, strict=True)}
        refuse_unknown(names, known, of="sweep")
        for name in names or known:
            if _status(known[name]) not in ENDED:
                known[name].request_cancel("the process that launched it")

    def __iter__(self) -> Iterator[RunDirectory]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        """State and progress of every run, each in a line."""
        width = max((len(plan.name) for plan in self.planned), default=0)
        lines = [
            f"  {plan.name:<{width}}  {_status(run):<9}  {steps_recorded(run)}/{run.spec.steps} steps"
            for plan, run in zip(self.planned, self.runs, strict=True)
        ]
        return "\n".join([f"Sweep of {len(self.runs)} runs in {self.experiment_dir.name}", *lines])

    # ---- execution -----------------------------------------------------------------------------------

    def in_jobs(self, start: Starter, *, gpus: Sequence[str] = (), leased: bool = True) -> Sweep:
        """Start the thread that starts a job for every run, and return at once.

        Args:
            start: starts the job of one run.
            gpus: ids of the GPUs that the runs may use.
            leased: the jobs run on this machine, share its devices with other launchers, and end with this process.
                Otherwise they run on a cluster and outlive this process.
        """
        self._jobs_outlive_us = not leased
        atexit.register(self._leave)
        threading.Thread(
            target=self._watch, args=(start, gpus, leased), name=f"sweep {self.experiment_dir.name}", daemon=True
        ).start()
        return self

    def here(self, run_here: Callable[[Task], None]) -> Sweep:
        """Execute the runs in this process and thread, one after another, and return when the last has ended."""
        try:
            remaining = self._report_reused()
            while task := _ready(remaining, []):
                remaining.remove(task)
                task.started = time.monotonic()
                self._report_progress(task)
                try:
                    run_here(task)
                except KeyboardInterrupt:
                    task.run.set_state("cancelled")
                    raise
                except Exception as error:
                    if 0 not in task.run.exits():
                        task.run.write_exit(0, {}, error)
                    task.run.set_state("failed")
                self._report_end(task, task.run.state["state"])
        finally:
            self._close()
        return self

    def _watch(self, start: Starter, gpus: Sequence[str], leased: bool) -> None:
        try:
            waiting, active = self._report_reused(), []
            while (waiting or active) and not self._stop.is_set():
                self._drop_cancelled(waiting)
                while (task := _ready(waiting, active)) and (not leased or task.take_devices(gpus)):
                    waiting.remove(task)
                    with self._isolated(task):
                        if self._begin(task, start):
                            active.append(task)
                for task in list(active):
                    with self._isolated(task):
                        state = self._poll(task)
                        if state != "running":
                            active.remove(task)
                            self._report_end(task, record_end(task.run, state))
                active = [task for task in active if not task.abandoned]
                self._stop.wait(_POLL_S)
        except BaseException as error:
            self._error = error
        finally:
            self._close()

    @contextlib.contextmanager
    def _isolated(self, task: Task) -> Iterator[None]:
        """End a run alone if its directory is gone or cannot be written; `wait` raises why, and the others continue."""
        try:
            yield
        except (OSError, WorkbenchError) as error:
            self._error = self._error or error
            task.abandoned = True
            with contextlib.suppress(OSError, WorkbenchError):
                if task.job:
                    task.job.cancel()
                record_end(task.run, "cancelled")
            self._report_end(task, _status(task.run), f"{type(error).__name__}: {error}".partition("\n")[0])

    def _begin(self, task: Task, start: Starter) -> bool:
        task.started = time.monotonic()
        try:
            task.job = start(task.run, task.plan.world_size, task.placement)
        except LaunchError as error:
            task.run.write_exit(None, {}, error, cause="start")
            self._report_end(task, task.run.set_state("failed"))
            return False
        task.run.note(handle=task.job.handle)
        self._report_progress(task)
        return True

    def _poll(self, task: Task) -> str:
        assert task.job is not None, "an active task has a job"
        if task.run.cancel_requested:
            task.job.cancel()
        state = task.job.poll()
        if state == "running":
            self._report_progress(task)
            task.note_user()
        return state

    def _drop_cancelled(self, waiting: list[Task]) -> None:
        for task in [task for task in waiting if task.run.cancel_requested]:
            waiting.remove(task)
            self._report_end(task, task.run.set_state("cancelled"))

    def _leave(self) -> None:
        """End the jobs of this machine in order when the interpreter ends, before they notice it themselves."""
        self._stop.set()
        self._finished.wait(_GRACE_S)

    def _close(self) -> None:
        """Close every run, even if one of them raises, and report the end of the sweep."""
        for task in self._tasks:
            if not (task.reused or task.abandoned):
                try:
                    self._close_one(task)
                except (OSError, WorkbenchError) as error:
                    self._error = self._error or error
                finally:
                    task.release()
        atexit.unregister(self._leave)
        self._finished.set()
        self._events.put(None)

    def _close_one(self, task: Task) -> None:
        """Stop its job, unless that is on a cluster; cancel the run, or remove its folder if it never started."""
        if task.job and self._jobs_outlive_us:
            return
        if task.job:
            task.job.cancel()
        if task.run.state["state"] in ENDED:
            return
        if task.started:
            record_end(task.run, "cancelled")
        else:
            shutil.rmtree(task.run.path)

    # ---- events --------------------------------------------------------------------------------------

    def _report_reused(self) -> list[Task]:
        """Report the runs that need not run, and return the others."""
        for task in self._tasks:
            if task.reused:
                self._report_end(task, "reused")
        return [task for task in self._tasks if not task.reused]

    def _report_progress(self, task: Task) -> None:
        """Report new steps, once."""
        if task.read_steps():
            self._report(task, 0, "running", "")

    def _report_end(self, task: Task, state: str, why: str = "") -> None:
        """Release the devices of a run and report its end."""
        task.release()
        self._ended += 1
        task.read_steps()
        failure = task.run.failure() if state in ("failed", "lost") and not why else None
        self._report(task, self._ended, state, failure_summary(failure) if failure else why)

    def _report(self, task: Task, number: int, state: str, why: str) -> None:
        event = task.event(number, len(self._tasks), state, why)
        self._events.put(event)
        self._on_event(event)


def refuse_unknown(names: Sequence[str], known: Mapping[str, RunDirectory], *, of: str) -> None:
    """Refuse to cancel runs by names that do not exist."""
    if unknown := [name for name in names if name not in known]:
        raise LaunchError(
            f"cancel {', '.join(unknown)}",
            found=", ".join(known) or "no run",
            rule=f"names of runs of this {of}",
            fix="choose among them, or name none for all",
        )


def _status(run: RunDirectory) -> str:
    """State of a run; lost if its directory cannot be read."""
    try:
        return run.status
    except RecordError:
        return "lost"


def _ready(waiting: Sequence[Task], active: Sequence[Task]) -> Task | None:
    """The first run that does not need the record of an unfinished run."""
    unfinished = {task.plan.name for task in [*waiting, *active]}
    return next((task for task in waiting if task.run.spec.frozen_clip not in unfinished), None)
