"""The runs of a sweep, the jobs that execute them, and the events that they report."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from workbench.errors import LaunchError, RecordError
from workbench.launch.ablation import PlannedRun
from workbench.launch.devices import Lease, Placement, cores, take
from workbench.launch.jobs import Job
from workbench.records.directory import RunDirectory
from workbench.records.progress import Pace, StepTail

Kind = tuple[int, str]
"""World size and device of a run. Runs of one kind may share a job."""


@dataclass(frozen=True)
class RunEvent:
    """A step or the end of a run.

    Attributes:
        number: of the run, from 1, in the order in which runs end; 0 while it runs.
        total: runs in all.
        state: pending (in a cluster's queue), running or an ended state; "reused" if an earlier run's record is used.
        device_note: the reason for the device, "" if it was requested.
        steps_done: optimizer steps recorded so far, of ``steps``.
        seconds: since it was started.
        why: one-line summary of its failure, or why it waits; "" otherwise.
        seconds_left: estimate from its last steps; None if it has ended, or too few steps have.
        all_seconds_left: estimate for all runs; None if none has ended, or all have.
    """

    number: int
    total: int
    name: str
    state: str
    world_size: int
    device: str
    device_note: str
    steps_done: int
    steps: int
    seconds: float
    why: str = ""
    seconds_left: float | None = None
    all_seconds_left: float | None = None

    def __str__(self) -> str:
        """The event in a line."""
        width = len(str(self.total))
        count = f"[{self.number or '.':>{width}}/{self.total}]"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ' '}"
        note = f" ({self.device_note})" if self.device_note else ""
        why = f": {self.why}" if self.why else ""
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        if self.number and self.all_seconds_left is not None:
            left = f", {self.all_seconds_left:.0f} s left in all"
        return (
            f"{count} {self.name:<28} {ranks} {self.device}  {self.steps_done}/{self.steps} steps  "
            f"{self.state} {self.seconds:.1f} s{left}{why}{note}"
        )


@dataclass(eq=False)
class Task:
    """One run of a sweep, with the state of its watcher."""

    plan: PlannedRun
    run: RunDirectory
    placement: Placement
    reused: bool = False  # an earlier run is used, so there is nothing to start
    started: float = 0.0
    abandoned: bool = False
    ended: bool = False
    steps_done: int = -1
    tail: StepTail = field(init=False)
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self.tail = StepTail(self.run)

    @property
    def kind(self) -> Kind:
        """World size and device."""
        return self.plan.world_size, self.placement.device

    def read_steps(self) -> bool:
        """Read the new step records; True if there are any, and the first time."""
        before, self.steps_done = self.steps_done, max(self.steps_done, 0)
        with contextlib.suppress(RecordError):
            new = self.tail.new()
            self.pace.add(new)
            self.steps_done = self.tail.count
        return self.steps_done != before

    def event(self, number: int, total: int, state: str, why: str, all_seconds_left: float | None = None) -> RunEvent:
        """The event of this moment; see `RunEvent`."""
        return RunEvent(
            number,
            total,
            self.plan.name,
            state,
            self.plan.world_size,
            self.placement.device,
            self.placement.note,
            self.steps_done,
            self.run.spec.steps,
            time.monotonic() - self.started if self.started else 0.0,
            why,
            self.pace.seconds_left(self.run.spec.steps - self.steps_done) if state == "running" else None,
            all_seconds_left,
        )


@dataclass(eq=False)
class SharedJob:
    """A job whose ranks execute tasks of one kind one after another, on devices that it holds.

    Attributes:
        tasks: those that have not ended, in order; the first is executed.
        job: the started job; None before.
        lease: devices of this machine; None on a cluster.
        cancelled: it was cancelled because the end of its first run was requested.
        noted_reason: the scheduler's description that its runs have stored.
    """

    tasks: list[Task]
    job: Job | None = None
    lease: Lease | None = None
    cancelled: bool = False
    user_recorded: bool = False
    noted_reason: str = ""

    def take_devices(self, gpus: Sequence[str]) -> bool:
        """Lease the devices of the job; False if too few are free, used by this process or another one."""
        ranks, device = self.tasks[0].kind
        kind, devices = ("gpu", gpus) if device == "cuda" else ("core", cores())
        # of the sweep: its next job may become another one, and must not wait for the request of the one before
        lease = self.lease = take(kind, ranks, devices, requester=str(self.tasks[0].run.path.parent))
        if lease is not None and kind == "gpu":
            for task in self.tasks:
                task.placement = replace(task.placement, gpus=lease.ids)
        return lease is not None

    def note_user(self) -> None:
        """Keep the devices taken while the processes of the job live, even after this one."""
        agent = self.tasks[0].run.state.get("agent")
        if self.lease is not None and not self.user_recorded and agent is not None:
            self.lease.note(agent["pid"], agent["create_time"])
            self.user_recorded = True

    def release(self) -> None:
        """Free the devices; nothing if that was done."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


STEPS_OF_A_START, STEPS_PER_JOB = 5, 200
"""Steps of a job, at least and at most, if the launcher chooses its runs. On this machine a start costs as much as 3 to
8 steps of a small model (1 to 2 s on two cores, steps of 0.2 to 0.4 s). Fewer do not pay for a job of their own; longer
runs gain nothing by sharing one, which a failure of one of them ends."""


def share(runs: Sequence[tuple[Kind, int]], slots: Mapping[str, int], per_job: int | None = None) -> dict[Kind, int]:
    """Return the number of runs of each kind that share a job.

    Args:
        runs: kind and number of steps of the runs that will be started.
        slots: devices of this machine by name, "cpu" and "cuda"; {} on a cluster, where each job waits in a queue.
        per_job: the number if the user has chosen one. None: as many as keep the machine's devices busy, between
            `STEPS_OF_A_START` and `STEPS_PER_JOB` steps.

    Raises:
        LaunchError: fewer than one run for a job.

    Example:
        >>> share([((1, "cpu"), 4)] * 16 + [((2, "cpu"), 4)] * 7, {"cpu": 2})
        {(1, 'cpu'): 8, (2, 'cpu'): 7}
    """
    if per_job is not None and per_job < 1:
        raise LaunchError(
            f"{per_job} runs for each job", rule="at least one", fix="leave per_job out, and the launcher chooses"
        )
    steps_of: dict[Kind, list[int]] = {}
    for kind, steps in runs:
        steps_of.setdefault(kind, []).append(steps)
    sizes = {}
    for (ranks, device), steps_each in steps_of.items():
        at_once = max(1, slots.get(device, 0) // ranks)
        longest = max(steps_each)
        least, most = math.ceil(STEPS_OF_A_START / longest), max(1, STEPS_PER_JOB // longest)
        sizes[ranks, device] = per_job or min(max(least, math.ceil(len(steps_each) / at_once)), most)
    return sizes
