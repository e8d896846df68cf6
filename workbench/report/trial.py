"""A run that is followed: read incrementally from its directory.

A `TrialReader` reads only what is new: step records from where it stopped, the state while the run is in progress, and
of a run that has ended only whether its state file has changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.errors import WorkbenchError
from workbench.records.directory import ENDED, RunDirectory, StepTail, failure_summary
from workbench.records.progress import Pace
from workbench.report.numbers import NONE, significant
from workbench.report.sparkline import sparkline_text

LOSS, GRADIENT_NORM, REWARD = "loss/total/sum", "gradient/norm/global", "reward/all/mean"

GONE = "gone"
"""State of a run whose directory no longer exists."""


@dataclass(frozen=True)
class Trial:
    """One run as a panel shows it. Equal values look the same.

    Attributes:
        name: name of the run.
        folder: name of its directory.
        state: pending, running, succeeded, failed, cancelled, lost; or `GONE`.
        steps_done: optimizer steps recorded so far.
        steps: optimizer steps in all.
        ranks: its world size.
        loss: loss of each step, as recorded; None where a step recorded none.
        gradient_norm: likewise, the global one.
        seconds: since its ranks started, whole while it runs; None before.
        reward: mean reward of each step's sampling, of an online run.
        seconds_left: estimate, whole, while it runs and enough steps have ended; None otherwise.
        note: what it waits for, or why it failed; "" if nothing.
        place: where it runs if not as requested, and why; "" otherwise.
        created_ns: time of the request, in nanoseconds since 1970; 0 if unknown.
        ended_ns: likewise its end; 0 before.
    """

    name: str
    folder: str
    state: str
    steps_done: int
    steps: int
    ranks: int
    loss: tuple[float | None, ...] = ()
    gradient_norm: tuple[float | None, ...] = ()
    seconds: float | None = None
    reward: tuple[float | None, ...] = ()
    seconds_left: float | None = None
    note: str = ""
    place: str = ""
    created_ns: int = 0
    ended_ns: int = 0

    @property
    def ended(self) -> bool:
        """True if nothing more will happen."""
        return self.state in ENDED or self.state == GONE


class TrialReader:
    """Follow one run directory.

    Example:
        >>> reader = TrialReader(run)   # doctest: +SKIP
        >>> reader.read().steps_done    # doctest: +SKIP
        3
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._tail: StepTail | None = StepTail(run)
        self._pace = Pace()
        self._mark: tuple[int, ...] | None = None
        self._damage = ""
        ranks = run.spec.layout.world_size
        self._last = Trial(run.path.name, run.path.name, "pending", 0, run.spec.steps, ranks)

    def read(self) -> Trial:
        """Return the run as it is now. Never raises: read errors are reported in the note."""
        mark = _mark(self.run)
        if mark is None:
            self._last = replace(self._last, state=GONE, note="its folder was removed")
        elif mark != self._mark or not self._last.ended:
            try:
                self._last = self._look()
                self._mark = mark
            except WorkbenchError as error:
                self._last = replace(self._last, note=_one_line(error))
            except (OSError, KeyError, TypeError, ValueError) as error:
                self._last = replace(self._last, note=f"{type(error).__name__}: {error}")
        return self._last

    def _look(self) -> Trial:
        # the state first, so that no step before the end is missed
        status, state = self.run.status, self.run.state
        new = self._new_steps()
        self._pace.add(new)
        done = self._last.steps_done + len(new)
        left = self._pace.seconds_left(self.run.spec.steps - done) if status == "running" else None
        return replace(
            self._last,
            name=str(state["name"]),
            state=status,
            ranks=int(state.get("world_size", self._last.ranks)),
            steps_done=done,
            reward=_longer(self._last.reward, [r for r in new if REWARD in r], REWARD),
            seconds_left=None if left is None else float(math.ceil(left)),
            loss=_longer(self._last.loss, new, LOSS),
            gradient_norm=_longer(self._last.gradient_norm, new, GRADIENT_NORM),
            seconds=_seconds(status, state),
            note=self._damage or self._note(status, state),
            place=_place(state),
            created_ns=int(state.get("created_ns", 0)),
            ended_ns=int(state.get("ended_ns", 0)),
        )

    def _new_steps(self) -> list[dict[str, Any]]:
        if self._tail is None:
            return []
        try:
            return self._tail.new()
        except WorkbenchError as error:
            self._tail, self._damage = None, _one_line(error)
            return []

    def _note(self, status: str, state: dict[str, Any]) -> str:
        if status == "failed":
            failure = self.run.failure()
            return failure_summary(failure) if failure else "no rank recorded a cause"
        if status == "lost":
            return "no process is left that could end it; launch again to finish what is missing"
        if status in ENDED:
            return ""
        if self.run.cancel_requested:
            return "cancellation requested"
        return self._waits_for(state) if status == "pending" else ""

    def _waits_for(self, state: dict[str, Any]) -> str:
        folder = state.get("frozen_clip_run")
        if folder:
            decides = RunDirectory(self.run.path.parent / folder, self.run.spec)
            if decides.path.is_dir() and decides.state["state"] not in ENDED:
                return f"waits for the clip decisions of {decides.name}"
        return "waits for its turn"


def as_line(trial: Trial, *, names: int = 0) -> str:
    """Format one trial as a line of text.

    Args:
        trial: the trial.
        names: minimum width of the name, so that lines are aligned.

    Example:
        >>> as_line(Trial("cp2", "cp2-0badcafe", "running", 2, 4, 2, (0.5, 0.25), (1.0, 2.0), 3.0))
        'cp2  running    2/4 steps  3 s     loss █▁ 0.250  gradient norm ▁█ 2.00'
    """
    cells = [
        f"{trial.name:<{names}}",
        f"{trial.state:<9}",
        f"{trial.steps_done}/{trial.steps} steps",
        f"{duration(trial.seconds):<6}",
    ]
    for label, values in (("loss", trial.loss), ("gradient norm", trial.gradient_norm), ("reward", trial.reward)):
        if values:
            cells.append(f"{label} {sparkline_text(values)} {last(values)}")
    return "  ".join(filter(None, [*cells, left(trial), trial.note])).rstrip()


def left(trial: Trial) -> str:
    """Format the estimated time left, "" if unknown.

    Example:
        >>> left(Trial("cp2", "cp2-0badcafe", "running", 2, 4, 2, seconds_left=75.0))
        '1 min 15 s left'
    """
    return "" if trial.seconds_left is None else f"{duration(trial.seconds_left)} left"


def elapsed_s(trials: Sequence[Trial], began_ns: int = 0) -> float | None:
    """Return whole seconds from the launch to the end of the last trial, or to now while one is in progress.

    Args:
        trials: all of them.
        began_ns: time of the launch; 0 takes the first creation.
    """
    began = began_ns or min((trial.created_ns for trial in trials if trial.created_ns), default=0)
    over = max((trial.ended_ns for trial in trials), default=0) if all(trial.ended for trial in trials) else 0
    return float(max(0, (over or time.time_ns()) - began) // 10**9) if began else None


def last(values: Sequence[float | None]) -> str:
    """Format the last value, in few digits."""
    return significant(values[-1]) if values else NONE


def duration(seconds: float | None) -> str:
    """Format a duration.

    Example:
        >>> duration(3.0), duration(3.25), duration(75.2), duration(7260), duration(None)
        ('3 s', '3.2 s', '1 min 15 s', '2 h 1 min', '–')
    """
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds == int(seconds) else f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _mark(run: RunDirectory) -> tuple[int, ...] | None:
    """Return a value that changes when the state is written; None if the run does not exist."""
    try:
        stat = (run.path / "state.json").stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _seconds(status: str, state: dict[str, Any]) -> float | None:
    if "started_ns" not in state or status == "lost":
        return None
    if status in ENDED:
        return round((state.get("ended_ns", state["started_ns"]) - state["started_ns"]) / 1e9, 1)
    return float(math.floor(max(0, time.time_ns() - state["started_ns"]) / 1e9))


def _place(state: dict[str, Any]) -> str:
    note = state.get("device_note")
    return f"on {state.get('device', 'cpu')}: {note}" if note else ""


def _longer(values: tuple[float | None, ...], new: list[dict[str, Any]], key: str) -> tuple[float | None, ...]:
    """Append new values; without any, return the same tuple, so that a comparison costs nothing."""
    return (*values, *(record.get(key) for record in new)) if new else values


def _one_line(error: WorkbenchError) -> str:
    return f"{error.parts['requested']}: {error.parts['found']}"
