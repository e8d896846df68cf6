"""A run that is followed: its records and its logs, read incrementally."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.errors import RecordError, WorkbenchError, listed
from workbench.launch.detached import launchers
from workbench.launch.resume import read_record
from workbench.launch.sweep import Sweep
from workbench.records.directory import RunDirectory
from workbench.records.failures import failure_summary
from workbench.records.lookup import look_up
from workbench.records.progress import Pace, StepTail
from workbench.records.provenance import project_root
from workbench.records.states import CLUSTERS, ENDED
from workbench.report.numbers import GRADIENT_NORM, LOSS, REWARD

GONE = "gone"
"""State of a run whose directory no longer exists."""

LINES = 200
_READ_BYTES = 64 * 1024  # per read; the beginning of what came faster than that is skipped
_LINE_LETTERS = 2000
_NO_CURVES: dict[str, Any] = {"loss": (), "gradient_norm": (), "reward": ()}
_TERMINAL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")


@dataclass(frozen=True)
class Trial:
    """One run as a panel shows it. Equal values look the same.

    Attributes:
        state: pending, running, succeeded, failed, cancelled, lost; or `GONE`.
        steps_done, steps: optimizer steps recorded so far, and in all.
        loss, gradient_norm, reward: of each step, as recorded; None where a step recorded none.
        seconds: since its ranks started, whole while it runs; None before.
        seconds_left: estimate, whole, while it runs and enough steps have ended; None otherwise.
        note: what it waits for, or why it failed; "" if nothing.
        place: where it runs if not as requested, and why; "" otherwise.
        created_ns, ended_ns: the request and the end, in nanoseconds since 1970; 0 if unknown, or before.
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

    Only what is new is read: step records from where it stopped, the state while the run is in progress, and of a run
    that has ended only whether its state file has changed.
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
        done = self._last.steps_done if self._tail is None else self._tail.count
        last = self._last if done > len(new) or self._tail is None else replace(self._last, **_NO_CURVES)
        left = self._pace.seconds_left(self.run.spec.steps - done) if status == "running" else None
        place = state.get("device_note")
        return replace(
            self._last,
            name=str(state["name"]),
            state=status,
            ranks=int(state.get("world_size", self._last.ranks)),
            steps_done=done,
            reward=_longer(last.reward, [r for r in new if REWARD in r], REWARD),
            seconds_left=None if left is None else float(math.ceil(left)),
            loss=_longer(last.loss, new, LOSS),
            gradient_norm=_longer(last.gradient_norm, new, GRADIENT_NORM),
            seconds=_seconds(status, state),
            note=self._damage or self._note(status, state),
            place=f"on {state.get('device', 'cpu')}: {place}" if place else "",
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
        if status not in ENDED and self.run.cancel_requested:
            return "cancellation requested"
        if status != "pending":
            return ""
        if folder := state.get("frozen_clip_run"):
            decides = RunDirectory(self.run.path.parent / folder, self.run.spec)
            if decides.path.is_dir() and decides.state["state"] not in ENDED:
                return f"waits for the clip decisions of {decides.name}"
        return "waits for its turn"


def elapsed_s(trials: Sequence[Trial], began_ns: int = 0) -> float | None:
    """Return whole seconds from the launch to the end of the last trial, or to now while one is in progress."""
    began = began_ns or min((trial.created_ns for trial in trials if trial.created_ns), default=0)
    over = max((trial.ended_ns for trial in trials), default=0) if all(trial.ended for trial in trials) else 0
    return float(max(0, (over or time.time_ns()) - began) // 10**9) if began else None


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


def _longer(values: tuple[float | None, ...], new: list[dict[str, Any]], key: str) -> tuple[float | None, ...]:
    """Append new values; without any, return the same tuple, so that a comparison costs nothing."""
    return (*values, *(record.get(key) for record in new)) if new else values


def _one_line(error: WorkbenchError) -> str:
    return f"{error.parts['requested']}: {error.parts['found']}"


# ---- logs -------------------------------------------------------------------------------------------------


class LogTail:
    """The last lines of a growing log, which need not exist yet; read from where the last read stopped.

    Lines are as a terminal shows them, without colours; of a line that overwrites itself, the last state.

    Attributes:
        passed_over: bytes of the file that were skipped, because the log grew too fast.
    """

    def __init__(self, path: Path, lines: int = LINES) -> None:
        self.path = path
        self.passed_over = 0
        self._lines: deque[str] = deque(maxlen=lines)
        self._offset, self._rest = 0, b""
        self._cut = False  # the current line lacks its beginning

    def read(self) -> bool:
        """Read what is new; return True if there was anything."""
        try:
            size = self.path.stat().st_size
            if size == self._offset:
                return False
            if size < self._offset:  # the log was started again
                self._lines.clear()
                self._offset, self._rest, self.passed_over, self._cut = 0, b"", 0, False
            begin = max(self._offset, size - _READ_BYTES)
            with self.path.open("rb") as file:
                file.seek(begin)
                content = file.read(size - begin)
        except OSError:
            return False
        if begin > self._offset:
            self.passed_over += begin - self._offset
            self._rest, self._cut = b"", True
        self._offset = begin + len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        if whole and self._cut:
            whole[0], self._cut = b"... " + whole[0], False
        self._lines.extend(map(_as_text, whole))
        self._rest = self._rest[-_READ_BYTES:]
        return bool(content)

    def text(self) -> str:
        """Return the last lines; the very last one may be incomplete."""
        lines = [*self._lines, *([_as_text(self._rest)] if self._rest else [])]
        return "\n".join(lines[-(self._lines.maxlen or LINES) :])


def _as_text(line: bytes) -> str:
    plain = _TERMINAL.sub(b"", line).rstrip(b"\r")
    shown = plain.rpartition(b"\r")[2].decode("utf8", errors="replace")
    shown = "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return shown if len(shown) <= _LINE_LETTERS else f"{shown[:_LINE_LETTERS]} ..."


# ---- targets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """Runs that are followed together.

    Attributes:
        began_ns: their launch, in nanoseconds since 1970; 0 if not recorded.
        command: command that cancels them from a terminal.
        unreadable: runs that cannot be opened, a line each.
    """

    what: str
    runs: Sequence[RunDirectory]
    began_ns: int = 0
    command: str = ""
    unreadable: tuple[str, ...] = ()

    @property
    def lifetime(self) -> str:
        """Sentence on the fate of the runs when this process or their launcher ends; "" if all have ended."""
        live = []
        for run in self.runs:
            with contextlib.suppress(RecordError):  # its row says what is wrong with it
                live += [run.state] if run.status not in ENDED else []
        pids = {state["launcher"]["pid"] for state in live if "launcher" in state}
        if not live or not pids:
            return ""
        if all(state.get("backend") in CLUSTERS for state in live):
            return "The cluster's jobs continue without this notebook; those that wait for others need their launcher."
        detached = {each.pid for run in self.runs for each in launchers(run.path.parent)}
        if pids <= detached:
            return f"Process {listed(sorted(pids))} continues them without this notebook: a kernel restart ends none."
        if pids == {os.getpid()}:
            return "They end with this kernel. launch(detached=True) starts runs that do not."
        return f"They end with the process that launched them, {listed(sorted(pids))}."


def subject_of(target: Any) -> Subject:
    """Return the runs of a target, see `workbench.report.panel.attach`.

    Raises:
        RecordError: there is no run.
    """
    if isinstance(target, Sweep):
        record = read_record(target.experiment_dir / "runs")
        its_own = record is not None and set(record["latest"].values()) == {run.path.name for run in target.runs}
        return Subject(
            target.experiment_dir.name,
            target.runs,
            record["created_ns"] if record and its_own else 0,
            _command(target.experiment_dir),
        )
    if isinstance(target, RunDirectory):
        return Subject(target.path.name, [target], 0, _command(target.path))
    if not isinstance(target, str | Path):
        return _several([subject_of(each) for each in target])
    match = look_up(target)
    if match.experiment is None:
        return subject_of(match.opened()[0])
    record = read_record(match.experiment / "runs")
    shown = match.runs
    if record is not None:
        by_folder = {each.path.name: each for each in match.runs}
        shown = tuple(by_folder[name] for name in record["latest"].values() if name in by_folder) or shown
    return Subject(
        match.experiment.name,
        [each.run for each in shown if each.run is not None],
        record["created_ns"] if record else 0,
        _command(match.experiment),
        tuple(f"{each.path.name}: {each.problem}" for each in shown if each.run is None),
    )


def _several(parts: Sequence[Subject]) -> Subject:
    runs = list({run.path: run for part in parts for run in part.runs}.values())
    if not runs:
        raise RecordError(
            "attach to no run",
            found="an empty list",
            rule="at least one run or experiment",
            fix="give the folder of an experiment, such as experiments/layout_parity",
        )
    names = list(dict.fromkeys(run.path.parent.parent.name for run in runs))
    return Subject(
        ", ".join(names),
        runs,
        0,
        parts[0].command if len(parts) == 1 else "workbench cancel RUN",
        tuple(line for part in parts for line in part.unreadable),
    )


def _command(folder: Path) -> str:
    """Return the cancel command, for the project's root."""
    project = project_root()
    base = folder.parent if folder.parent == project / "experiments" else project
    shown = folder.relative_to(base) if folder.is_relative_to(base) else folder
    return shlex.join(["workbench", "cancel", str(shown)])
