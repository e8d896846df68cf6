"""The input of every tracker: a run as plain numbers and texts, with a note on everything that is lost."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.atomic import from_json
from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.records.failures import failure_summary
from workbench.specs.reading import flatten

TIME = "time/ended_ns"
"""Key of the end of a step in its record, in nanoseconds since 1970."""

FAILURE_LETTERS = 2000


@dataclass(frozen=True)
class TrackedStep:
    """One optimizer step, which ended at ``time_s`` (seconds since 1970); metric -> number, also nan and inf."""

    number: int
    time_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """One run.

    Attributes:
        id: name of the run's folder: unique in its experiment, and the same whenever it is exported.
        name: name of the configuration.
        state: one of `workbench.records.states.ENDED`.
        began_s, ended_s: in seconds since 1970.
        config: settings with dotted keys; lists stay lists.
        facts: further facts, with keys ``run.*``.
        notes: what could not be stored as it is, a sentence each.
    """

    id: str
    name: str
    experiment: str
    state: str
    began_s: float
    ended_s: float
    config: dict[str, Any]
    facts: dict[str, Any]
    steps: list[TrackedStep]
    notes: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """Return a name that is unique among experiments too, of letters, digits, "_", "." and "-"."""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{self.experiment}-{self.id}")

    @property
    def tags(self) -> list[str]:
        """Return tags to filter runs by: the state, and the faults that were switched on."""
        return [self.state, *(f"fault:{name}" for name in self.config.get("faults") or [])]


class Writer:
    """Base of the writers of trackers: each has ``has(run)`` and ``write(run)``, which returns what it could not store.

    Args:
        folder: gets the tracker's files.
        project: the tracker's project, above the experiments.
    """

    def __init__(self, folder: Path, project: str) -> None:
        self.folder, self.project = folder, project

    def live(self, run: TrackedRun) -> Any:
        """Begin a run that continues; return what has ``log_step(step)`` and ``end(run)``, each written at once."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave nothing running."""


def tracked(run: RunDirectory) -> TrackedRun:
    """Convert a run for trackers.

    Nested values of a step (a gradient norm for each parameter) get keys joined by "/". If a step does not record its
    end, its time is computed from the begin of the run and the durations of the steps.

    Raises:
        RecordError: step records that are damaged, or whose numbers do not grow; trackers drop such steps silently.
    """
    state, notes = run.state, []
    began_s = state.get("started_ns", state["created_ns"]) / 1e9
    steps: list[TrackedStep] = []
    clock_s, reckoned = began_s, False
    for index, record in enumerate(run.steps(partial=True)):
        number = record.get("step", index)
        if not isinstance(number, int) or (steps and number <= steps[-1].number):
            raise RecordError(
                f"export {run.path.name}",
                found=f"step {number!r} after {index} others",
                rule="step numbers grow",
                fix="run the configuration again",
            )
        values, skipped = _numbers(record)
        notes += [f"{key} is not a number: left out" for key in skipped]
        clock_s += values.get("time/step_ms", 0.0) / 1e3
        time_s = values.pop(TIME, 0.0) / 1e9
        reckoned |= not time_s
        steps.append(TrackedStep(number, time_s or clock_s, values))
    if reckoned:
        notes.append("steps do not say when they ended: reckoned from the run's beginning and their durations")
    config = flatten(run.spec.model_dump(mode="json"))
    odd = {key: str(value) for key, value in config.items() if isinstance(value, float) and not math.isfinite(value)}
    notes += [f"setting {key} is not finite: kept as text" for key in odd]
    ended_s = state.get("ended_ns", 0) / 1e9 or max([began_s, *(step.time_s for step in steps[-1:])])
    return TrackedRun(
        run.path.name,
        str(state["name"]),
        run.path.parent.parent.name,
        run.status,
        began_s,
        ended_s,
        config | odd,
        _facts(run, state, began_s, ended_s),
        steps,
        list(dict.fromkeys(notes)),
    )


def as_text(value: Any) -> str:
    """Format a setting as text: scalars as Python writes them, lists as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def from_plain(data: Mapping[str, Any]) -> TrackedRun:
    """Rebuild a run from the output of `dataclasses.asdict`."""
    return TrackedRun(**{**data, "steps": [TrackedStep(**step) for step in data["steps"]]})


def _numbers(record: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, float], list[str]]:
    """Return the numbers of a step record, flat, and the keys of everything else."""
    numbers: dict[str, float] = {}
    others: list[str] = []
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner, more = _numbers(value, f"{name}/")
            numbers |= inner
            others += more
        elif isinstance(value, bool | int | float):
            if name != "step":
                numbers[name] = value if isinstance(value, float) else int(value)
        elif value is not None:
            others.append(name)
    return numbers, others


def _facts(run: RunDirectory, state: Mapping[str, Any], began_s: float, ended_s: float) -> dict[str, Any]:
    """Return facts that trackers have no field for."""
    facts: dict[str, Any] = {
        "run.state": run.status,
        "run.name": str(state["name"]),
        "run.experiment": run.path.parent.parent.name,
        "run.world_size": int(state.get("world_size", run.spec.layout.world_size)),
        "run.steps_planned": run.spec.steps,
        "run.began": _iso(began_s),
        "run.ended": _iso(ended_s),
    }
    facts |= {f"run.{key}": str(state[key]) for key in ("device", "device_note", "backend") if state.get(key)}
    if failure := run.failure():
        facts["run.failure"] = failure_summary(failure)[:FAILURE_LETTERS]
        facts |= {"run.failure_cause": str(failure["cause"])} if failure.get("cause") else {}
    return facts | _provenance(run)


def _iso(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="milliseconds")


def _provenance(run: RunDirectory) -> dict[str, str]:
    try:
        record = from_json((run.path / "provenance.json").read_bytes())
        return {
            "run.commit": str(record["git"]["commit"]),
            "run.uncommitted_changes": str(record["git"]["dirty"]),
            **{f"run.version.{name}": str(version) for name, version in record["versions"].items()},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
