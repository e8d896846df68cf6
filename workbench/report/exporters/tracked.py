"""What every tracker is given of a run: plain numbers and texts, with nothing lost on the way that is not said."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import RecordError
from workbench.records.directory import RunDirectory, failure_in_short, from_json
from workbench.specs.run import flatten

TIME = "time/ended_ns"
"""Key of a step record that says when the step ended, in nanoseconds since 1970."""

FAILURE_LETTERS = 2000


@dataclass(frozen=True)
class TrackedStep:
    """One optimizer step.

    Attributes:
        number: as recorded.
        time_s: when it ended, in seconds since 1970.
        values: metric -> number, also nan and inf.
    """

    number: int
    time_s: float
    values: dict[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """One run.

    Attributes:
        id: name of the run's folder: unique in its experiment, and the same whenever it is exported.
        name: of the configuration.
        experiment: groups runs.
        state: an ended one.
        began_s: in seconds since 1970.
        ended_s: likewise.
        config: settings with dotted keys; lists stay lists.
        facts: what else is known, with keys ``run.*``.
        steps: in order.
        notes: what could not be taken as it is, a sentence each.
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
        """A name that is unique among experiments too, of letters, digits, "_", "." and "-"."""
        return re.sub(r"[^A-Za-z0-9_.-]", "_", f"{self.experiment}-{self.id}")

    @property
    def tags(self) -> list[str]:
        """A few words to choose runs by: the state, and known bugs that were switched on."""
        return [self.state, *(f"fault:{name}" for name in self.config.get("faults") or [])]


def tracked(run: RunDirectory) -> TrackedRun:
    """A run as trackers get it.

    Nested values of a step (a gradient norm for each parameter) get keys joined by "/". Where a step does not say when
    it ended, its time is reckoned from the run's beginning and the steps' durations.

    Raises:
        RecordError: step records that are damaged, or whose numbers do not grow; trackers drop such steps in silence.
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
    config, odd = _plain(flatten(run.spec.model_dump(mode="json")))
    notes += [f"setting {key} is not finite: kept as text" for key in odd]
    ended_s = state.get("ended_ns", 0) / 1e9 or max([began_s, *(step.time_s for step in steps[-1:])])
    return TrackedRun(
        run.path.name,
        str(state["name"]),
        run.path.parent.parent.name,
        run.status,
        began_s,
        ended_s,
        config,
        _facts(run, state, began_s, ended_s),
        steps,
        list(dict.fromkeys(notes)),
    )


def as_text(value: Any) -> str:
    """A setting as text: scalars as Python writes them, lists as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def from_plain(data: Mapping[str, Any]) -> TrackedRun:
    """The run that `dataclasses.asdict` took apart."""
    return TrackedRun(**{**data, "steps": [TrackedStep(**step) for step in data["steps"]]})


def _numbers(record: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, float], list[str]]:
    """The numbers of a step record, flat, and the keys of everything else."""
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


def _plain(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    odd = [key for key, value in settings.items() if isinstance(value, float) and not math.isfinite(value)]
    return {key: str(value) if key in odd else value for key, value in settings.items()}, odd


def _facts(run: RunDirectory, state: Mapping[str, Any], began_s: float, ended_s: float) -> dict[str, Any]:
    """What trackers have no place of their own for."""
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
        facts["run.failure"] = failure_in_short(failure)[:FAILURE_LETTERS]
        facts |= {"run.failure_cause": str(failure["cause"])} if failure.get("cause") else {}
    return facts | {f"run.{key}": value for key, value in _made_by(run).items()}


def _iso(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="milliseconds")


def _made_by(run: RunDirectory) -> dict[str, str]:
    try:
        made = from_json((run.path / "provenance.json").read_bytes())
        return {
            "commit": str(made["git"]["commit"]),
            "uncommitted_changes": str(made["git"]["dirty"]),
            **{f"version.{name}": str(version) for name, version in made["versions"].items()},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
