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

from workbench.columns import columns
from workbench.errors import LaunchError, RecordError, WorkbenchError
from workbench.launch.devices import Placement, cores
from workbench.launch.failure_analysis import record_end
from workbench.launch.jobs import Job
from workbench.launch.task import Kind, RunEvent, SharedJob, Task, share
from workbench.records.directory import RunDirectory
from workbench.records.failures import failure_summary
from workbench.records.progress import steps_recorded
from workbench.records.states import ENDED

_POLL_S = 0.1
_GRACE_S = 20.0  # time that the watching thread has to end its jobs when the interpreter ends

Starter = Callable[[Sequence[RunDirectory], int, Placement], Job]
"""Starts a job, given the directories of the runs that it executes, the number of ranks and their placement."""


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
        self._jobs: list[SharedJob] = []
        self._began = time.monotonic()
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
        rows = [
            ("", plan.name, _status(run), f"{steps_recorded(run)}/{run.spec.steps} steps")
            for plan, run in zip(self.planned, self.runs, strict=True)
        ]
        return "\n".join([f"Sweep of {len(self.runs)} runs in {self.experiment_dir.name}", *columns(rows)])

    # ---- execution -----------------------------------------------------------------------------------

    def in_jobs(
        self, start: Starter, *, gpus: Sequence[str] = (), leased: bool = True, per_job: int | None = 1
    ) -> Sweep:
        """Start the thread that starts the jobs, and return at once.

        Args:
            start: starts a job.
            gpus: ids of the GPUs that the runs may use.
            leased: the jobs run on this machine, share its devices with other launchers, and end with this process.
                Otherwise they run on a cluster and outlive this process.
            per_job: number of runs that share a job, see `workbench.launch.task.share`.
        """
        self._jobs_outlive_us = not leased
        atexit.register(self._leave)
        threading.Thread(
            target=self._watch,
            args=(start, gpus, leased, per_job),
            name=f"sweep {self.experiment_dir.name}",
            daemon=True,
        ).start()
        return self

    def here(self, run_here: Callable[[Task], None]) -> Sweep:
        """Execute the runs in this process and thread, one after another, and return when the last has ended."""
        try:
            remaining = self._report_reused()
            while ready := _ready(remaining, [], {}):
                [task] = ready
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

    def _watch(self, start: Starter, gpus: Sequence[str], leased: bool, per_job: int | None) -> None:
        try:
            waiting = self._report_reused()
            kinds = list(dict.fromkeys(task.kind for task in waiting))
            waiting.sort(key=lambda task: kinds.index(task.kind))  # jobs of one kind fill the machine together
            self._began = time.monotonic()
            slots = {"cpu": len(cores()), "cuda": len(gpus)} if leased else {}
            sizes = share([(task.kind, task.run.spec.steps) for task in waiting], slots, per_job)
            while (waiting or self._jobs) and not self._stop.is_set():
                self._drop_cancelled(waiting)
                while (tasks := _ready(waiting, [task for job in self._jobs for task in job.tasks], sizes)) and (
                    (shared := SharedJob(tasks)) and (not leased or shared.take_devices(gpus))
                ):
                    waiting = [task for task in waiting if task not in tasks]
                    self._jobs.append(shared)
                    with self._isolated(shared, waiting):
                        self._begin(shared, start, waiting)
                for shared in list(self._jobs):
                    with self._isolated(shared, waiting):
                        self._poll(shared, waiting)
                self._stop.wait(_POLL_S)
        except BaseException as error:
            self._error = error
        finally:
            self._close()

    @contextlib.contextmanager
    def _isolated(self, shared: SharedJob, waiting: list[Task]) -> Iterator[None]:
        """End a run alone if its directory is gone or cannot be written; `wait` raises why, and the others continue."""
        try:
            yield
        except (OSError, WorkbenchError) as error:
            self._error = self._error or error
            task = shared.tasks.pop(0)
            task.abandoned = True
            with contextlib.suppress(OSError, WorkbenchError):
                if shared.job:
                    shared.job.cancel()
                record_end(task.run, "cancelled")
            self._end_job(shared, waiting)
            self._report_end(task, _status(task.run), f"{type(error).__name__}: {error}".partition("\n")[0])

    def _begin(self, shared: SharedJob, start: Starter, waiting: list[Task]) -> None:
        first = shared.tasks[0]
        first.started = time.monotonic()
        try:
            shared.job = start([task.run for task in shared.tasks], first.plan.world_size, first.placement)
        except LaunchError as error:
            shared.tasks.pop(0)
            first.run.write_exit(None, {}, error, cause="start")
            self._end_job(shared, waiting)
            self._report_end(first, first.run.set_state("failed"))
            return
        for task in shared.tasks:
            task.run.note(handle=shared.job.handle, **({} if task is first else {"job_of": first.run.path.name}))
        self._report_progress(first)

    def _poll(self, shared: SharedJob, waiting: list[Task]) -> None:
        """Record what has ended: runs whose ranks are done, cancelled ones, the job."""
        assert shared.job is not None, "a job in the list was started"
        self._cancel_requested_in(shared)
        state = shared.job.poll()
        self._note_reason(shared)
        while shared.tasks and shared.tasks[0].run.ranks_done:
            self._end_first(shared, "succeeded")
        if state != "running":
            if shared.tasks and not shared.cancelled:
                self._end_first(shared, state)
            while shared.tasks and state == "cancelled" and not shared.cancelled:  # not by us: the job is not wanted
                self._end_first(shared, state)
            self._end_job(shared, waiting)
        elif shared.tasks:
            shared.tasks[0].started = shared.tasks[0].started or time.monotonic()
            self._report_progress(shared.tasks[0])
            shared.note_user()

    def _cancel_requested_in(self, shared: SharedJob) -> None:
        """Cancel runs of a job; a run that waits for its turn is skipped by the ranks, for another the job ends."""
        assert shared.job is not None, "a job in the list was started"
        requested = [task for task in shared.tasks if task.run.cancel_requested]
        for task in requested:
            if task.run.state["state"] in ENDED:
                continue
            if task.run.set_state("cancelled", unless="running") == "cancelled":
                shared.tasks.remove(task)
                self._report_end(task, "cancelled")
            elif task is shared.tasks[0]:
                shared.job.cancel()
                shared.cancelled = True
                self._end_first(shared, shared.job.poll())
                return
        if requested and not shared.tasks:
            shared.job.cancel()

    def _note_reason(self, shared: SharedJob) -> None:
        """Store the scheduler's own description of a job with its runs when it changes, for all readers of the disk."""
        assert shared.job is not None, "a job in the list was started"
        if shared.job.reason == shared.noted_reason:
            return
        shared.noted_reason = shared.job.reason
        for task in shared.tasks:
            task.run.note(scheduler=shared.job.reason)
        if shared.tasks and shared.tasks[0].run.state["state"] == "pending":
            self._report(shared.tasks[0], 0, "pending", shared.job.reason)

    def _end_first(self, shared: SharedJob, state: str) -> None:
        task = shared.tasks[0]
        ended_by = shared.job.reason if shared.job is not None and shared.job.ended_by_scheduler else ""
        self._report_end(task, record_end(task.run, state, scheduler=ended_by))
        shared.tasks.pop(0)

    def _end_job(self, shared: SharedJob, waiting: list[Task]) -> None:
        """Free the devices of a job that has ended, and let its remaining runs wait for another one."""
        shared.release()
        if shared in self._jobs:
            self._jobs.remove(shared)
        waiting[:0] = shared.tasks
        shared.tasks = []

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
        left = [task for shared in self._jobs for task in shared.tasks] if self._jobs_outlive_us else []
        for shared in self._jobs:
            with self._remembered():
                if shared.job and not self._jobs_outlive_us:
                    shared.job.cancel()
        for task in self._tasks:
            if not (task.reused or task.abandoned or task in left):
                with self._remembered():
                    self._close_one(task)
        for shared in self._jobs:
            shared.release()
        atexit.unregister(self._leave)
        self._finished.set()
        self._events.put(None)

    @contextlib.contextmanager
    def _remembered(self) -> Iterator[None]:
        """Continue after an error, which `wait` raises."""
        try:
            yield
        except (OSError, WorkbenchError) as error:
            self._error = self._error or error

    def _close_one(self, task: Task) -> None:
        """Cancel the run, or remove its folder if it never started."""
        state = task.run.state["state"]
        if state in ENDED:
            return
        if task.started or state == "running":
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
        """Report the end of a run."""
        task.ended = True
        self._ended += 1
        task.read_steps()
        failure = task.run.failure() if state in ("failed", "lost") and not why else None
        self._report(task, self._ended, state, failure_summary(failure) if failure else why)

    def _seconds_left(self) -> float | None:
        """Estimate for all runs, from the steps of every rank that were taken and those that were not."""
        started = [task for task in self._tasks if not task.reused]
        all_steps = sum(task.plan.world_size * task.run.spec.steps for task in started)
        left = sum(
            task.plan.world_size * (task.run.spec.steps - max(task.steps_done, 0)) for task in started if not task.ended
        )
        taken = all_steps - left
        return (time.monotonic() - self._began) * left / taken if taken and left else None

    def _report(self, task: Task, number: int, state: str, why: str) -> None:
        event = task.event(number, len(self._tasks), state, why, self._seconds_left())
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


def _ready(waiting: Sequence[Task], active: Sequence[Task], sizes: Mapping[Kind, int]) -> list[Task]:
    """The next runs that may share a job: none needs the record of an unfinished run that is not before it."""
    unfinished = {task.plan.name for task in [*waiting, *active]}
    chosen: list[Task] = []
    for task in waiting:
        if chosen and (task.kind != chosen[0].kind or len(chosen) >= sizes.get(task.kind, 1)):
            continue
        if task.run.spec.frozen_clip not in unfinished - {other.plan.name for other in chosen}:
            chosen.append(task)
    return chosen
