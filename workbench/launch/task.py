"""One run of a sweep, with the state of its watcher, and the events that it reports."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from workbench.errors import RecordError
from workbench.launch.ablation import PlannedRun
from workbench.launch.devices import Lease, Placement, cores, take
from workbench.launch.jobs import Job
from workbench.records.directory import RunDirectory
from workbench.records.progress import Pace, StepTail


@dataclass(frozen=True)
class RunEvent:
    """A step or the end of a run.

    Attributes:
        number: of the run, from 1, in the order in which runs end; 0 while it runs.
        total: runs in all.
        state: running or an ended state; "reused" if an earlier run's record is used.
        device_note: the reason for the device, "" if it was requested.
        steps_done: optimizer steps recorded so far, of ``steps``.
        seconds: since it was started.
        why: one-line summary of its failure; "" if it did not fail.
        seconds_left: estimate from its last steps; None if it has ended, or too few steps have.
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

    def __str__(self) -> str:
        """The event in a line."""
        width = len(str(self.total))
        count = f"[{self.number or '.':>{width}}/{self.total}]"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ' '}"
        note = f" ({self.device_note})" if self.device_note else ""
        why = f": {self.why}" if self.why else ""
        left = "" if self.seconds_left is None else f", {self.seconds_left:.0f} s left"
        return (
            f"{count} {self.name:<28} {ranks} {self.device}  {self.steps_done}/{self.steps} steps  "
            f"{self.state} {self.seconds:.1f} s{left}{why}{note}"
        )


@dataclass
class Task:
    """One run of a sweep, with the state of its watcher."""

    plan: PlannedRun
    run: RunDirectory
    placement: Placement
    reused: bool = False  # an earlier run is used, so there is nothing to start
    job: Job | None = None
    lease: Lease | None = None
    started: float = 0.0
    abandoned: bool = False
    steps_done: int = -1
    user_recorded: bool = False
    tail: StepTail = field(init=False)
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self.tail = StepTail(self.run)

    def take_devices(self, gpus: Sequence[str]) -> bool:
        """Lease the devices of the run; False if too few are free, used by this process or another one."""
        kind, devices = ("gpu", gpus) if self.placement.device == "cuda" else ("core", cores())
        self.lease = take(kind, self.plan.world_size, devices, requester=str(self.run.path))
        if self.lease is not None and kind == "gpu":
            self.placement = replace(self.placement, gpus=self.lease.ids)
        return self.lease is not None

    def note_user(self) -> None:
        """Keep the devices taken while the processes of the run live, even after this one."""
        if self.lease is not None and not self.user_recorded and (agent := self.run.state.get("agent")) is not None:
            self.lease.note(agent["pid"], agent["create_time"])
            self.user_recorded = True

    def release(self) -> None:
        """Free the devices; nothing if that was done."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def read_steps(self) -> bool:
        """Read the new step records; True if there are any, and the first time."""
        before, self.steps_done = self.steps_done, max(self.steps_done, 0)
        with contextlib.suppress(RecordError):
            new = self.tail.new()
            self.pace.add(new)
            self.steps_done += len(new)
        return self.steps_done != before

    def event(self, number: int, total: int, state: str, why: str) -> RunEvent:
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
        )
