"""State of runs, read from their directories: a line each for a list, or everything about one.

Torch is not imported, so that looking is quick.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.errors import RecordError, WorkbenchError
from workbench.launch.ablation import differences, load_ablation
from workbench.launch.waits import find_waits
from workbench.metrics.evidence import Evidence
from workbench.records.agents import read_of_agents
from workbench.records.damage import STATE_TYPES, check_types
from workbench.records.directory import RunDirectory
from workbench.records.failures import WAITING, failure_summary, root_cause
from workbench.records.lookup import RunEntry, experiment_at, experiments, runs_of
from workbench.records.progress import CONTINUES, Pace, steps_recorded
from workbench.records.states import ENDED, status_in
from workbench.sharding import flight

_TAIL_BYTES = 16 * 1024  # only the last line of a log is shown
_PATIENCE_S = 5.0  # healthy ranks wait for one another too, but not for that long


@dataclass(frozen=True)
class Listed:
    """A run in a list.

    Attributes:
        experiment: name of the folder that holds its ``runs``.
        name: of the configuration.
        folder: name of the run's own folder.
        state: one of `workbench.records.states.STATES`, or "unreadable".
        steps_done: optimizer steps recorded, of ``steps``.
        created_ns: time of the request.
        seconds: from the start of its first rank until its end, or until now; None before and if unknown.
        ranks: its world size; 0 if unknown.
        device: "cpu", "cuda", or "" if unknown.
        backend: what launched its ranks, "" if unknown.
        why: cause of the failure, why it waits in a cluster's queue or why it cannot be read, in a line; "" otherwise.

    Units: ``_ns`` counts nanoseconds since 1970.
    """

    experiment: str
    name: str
    folder: str
    state: str
    steps_done: int
    steps: int
    created_ns: int
    seconds: float | None
    ranks: int
    device: str
    backend: str
    why: str


def list_runs(*experiment_dirs: Path | str, every: bool = False, project: Path | None = None) -> list[Listed]:
    """Return every run of some experiments, newest last.

    Args:
        experiment_dirs: folders or names; none for all under ``experiments``.
        every: also older attempts, which a later one of the same name replaces.
        project: the folder that holds ``experiments``; None takes `project_root`.

    Raises:
        RecordError: no experiment there.

    Example:
        >>> pandas.DataFrame(list_runs("layout_parity"))   # doctest: +SKIP
    """
    folders = [experiment_at(folder, project) for folder in experiment_dirs] or experiments(project)
    listed = [listing(entry) for folder in dict.fromkeys(folders) for entry in runs_of(folder, every=every)]
    return sorted(listed, key=lambda run: (run.created_ns, run.experiment, run.folder))


def listing(entry: RunEntry) -> Listed:
    """Return a run as a list shows it; one that cannot be read has the state "unreadable"."""
    run, state = entry.run, entry.state
    unreadable = Listed(
        experiment=entry.experiment_dir.name,
        name=entry.name,
        folder=entry.path.name,
        state="unreadable",
        steps_done=0,
        steps=0,
        created_ns=entry.created_ns,
        seconds=None,
        ranks=ranks if isinstance(ranks := state.get("world_size", 0), int) else 0,
        device=str(state.get("device", "")),
        backend=str(state.get("backend", "")),
        why=entry.problem,
    )
    if run is None:
        return unreadable
    status = status_in(state)  # read before the records, so that no step before an end is missed
    try:
        steps_done = steps_recorded(run)
    except RecordError as error:
        return replace(unreadable, why=error.parts["found"])
    return replace(
        unreadable,
        state=status,
        steps_done=steps_done,
        steps=run.spec.steps,
        why=_why(entry, status),
        seconds=seconds(state, status),
        ranks=unreadable.ranks or run.spec.layout.world_size,
    )


def _steps_recorded(run: RunDirectory) -> int:
    with contextlib.suppress(RecordError):
        return steps_recorded(run)
    return 0


def seconds(state: dict[str, int], status: str) -> float | None:
    """Return the duration of a run, so far if it runs; None before it began, and if its end was not recorded."""
    if "started_ns" not in state or (status in ENDED and "ended_ns" not in state):
        return None
    return round((state["ended_ns"] if status in ENDED else time.time_ns()) / 1e9 - state["started_ns"] / 1e9, 3)


def _why(entry: RunEntry, status: str) -> str:
    if status == "pending":
        return str(entry.state.get("scheduler", ""))
    if entry.run is None or status not in ("failed", "lost"):
        return ""
    try:
        failure = entry.run.failure()
    except WorkbenchError as error:
        return error.parts["found"]
    if failure:
        return failure_summary(failure)
    return "no process is left that could end it" if status == "lost" else "no rank recorded a cause"


@dataclass(frozen=True)
class RankStatus:
    """State of one rank.

    Attributes:
        log_bytes: size of its log; None if there is none.
        last_line: the last line of its log that is not empty.
        ended: "well", one of `workbench.records.failures.CAUSES`, or "" if it recorded none.
        inside: the collective that it entered and has not left, "" if none is known.
    """

    rank: int
    log_bytes: int | None
    last_line: str
    ended: str
    inside: str


@dataclass(frozen=True)
class WaitStatus:
    """A rank that others wait for.

    Attributes:
        message: the collective, the waiting ranks, the duration, and what the rank did instead.
        stack: its Python stack, if the watchdog of the run recorded it; "" otherwise.
    """

    rank: int
    message: str
    stack: str


@dataclass(frozen=True)
class RunStatus:
    """State of a run; names that `Listed` has too mean the same.

    Attributes:
        started_ns: start of its first rank; None before.
        ended_ns: end; None before.
        device_note: why this device, "" if it is the requested one.
        handle: the scheduler's name of the job, "" if none.
        scheduler: the scheduler's description of the job when its launcher last asked, "" if none.
        continues: folder of the run that it continues, and from which step; "" if none.
        compared_with: name of the baseline run; "" if it is this one.
        settings: setting -> its values in the baseline run and in this one, where they differ.
        seconds_left: estimate by the pace of its last steps; None if it does not run, or too few have ended.
        step_ms: median time of a step, without the first, which warms up; None without others.
        last: the last step's record; {} if there is none.
        evidence: of all recorded steps, as `workbench.metrics.evidence.Evidence.as_json` has it: tokens and documents
            with a gradient, why a comparison would be vacuous, warnings; None for records without counts.
        waiting: ranks that are waited for; only while it runs.
        failure: the root cause, as `RunDirectory.failure` gives it.
        problem: which part of the record cannot be read, "" if all can.

    Units: ``_ns`` counts nanoseconds since 1970.
    """

    experiment: str
    name: str
    folder: str
    state: str
    cancel_requested: bool
    created_ns: int
    started_ns: int | None
    ended_ns: int | None
    seconds: float | None
    steps_done: int
    steps: int
    world_size: int
    device: str
    device_note: str
    backend: str
    handle: str
    scheduler: str
    continues: str
    compared_with: str
    settings: dict[str, list[Any]]
    seconds_left: float | None
    step_ms: float | None
    last: dict[str, Any]
    evidence: dict[str, Any] | None
    ranks: list[RankStatus]
    waiting: list[WaitStatus]
    failure: dict[str, Any] | None
    problem: str


def status_of(run: RunDirectory) -> RunStatus:
    """Return the state of a run: progress, settings that differ from its baseline's, ranks, and the cause of a failure.

    Unreadable parts of its record are named in `RunStatus.problem`; the rest is there.
    """
    return statuses([run])[0]


def statuses(runs: Iterable[RunDirectory]) -> list[RunStatus]:
    """Return `status_of` of many runs, for which the runs and the ablation of each experiment are read once."""
    baselines = functools.cache(_Baselines)
    return [_status(run, baselines(run.path.parent.parent)) for run in runs]


def _status(run: RunDirectory, baselines: _Baselines) -> RunStatus:
    experiment_dir = run.path.parent.parent
    state = run.state
    status = status_in(state)  # read before the records, so that no step before an end is missed
    problem, steps = "", []
    try:
        steps = run.steps()
    except RecordError as error:
        problem = error.parts["found"]
        with contextlib.suppress(RecordError):
            steps = run.steps(partial=True)
    try:
        exits = run.exits()
        failure = root_cause(exits.values())
    except (WorkbenchError, KeyError) as error:
        failure, exits, problem = None, {}, f"how its ranks ended: {error}"
    baseline = baselines.of(run.path, str(state["name"]))
    world_size = int(state.get("world_size", run.spec.layout.world_size))
    check_types(run.path / "config.json", {"world_size": world_size}, STATE_TYPES)
    evidence = Evidence.of_steps(steps)
    since = next((f" from step {record['step']}" for record in steps if CONTINUES in record), "")
    times = [record["time/step_ms"] for record in steps[1:] if "time/step_ms" in record]
    return RunStatus(
        experiment=experiment_dir.name,
        name=str(state["name"]),
        folder=run.path.name,
        state=status,
        cancel_requested=run.cancel_requested,
        created_ns=int(state.get("created_ns", 0)),
        started_ns=state.get("started_ns"),
        ended_ns=state.get("ended_ns"),
        seconds=seconds(state, status),
        steps_done=len(steps) if not problem else _steps_recorded(run),
        steps=run.spec.steps,
        world_size=world_size,
        device=str(state.get("device", "")),
        device_note=str(state.get("device_note", "")),
        backend=str(state.get("backend", "")),
        handle=str(state.get("handle", "")),
        scheduler=str(state.get("scheduler", "")),
        continues=f"with {state['continues']}{since}" if "continues" in state else "",
        compared_with=baseline.name if baseline else "",
        settings=differences(baseline.spec, run.spec) if baseline else {},
        seconds_left=Pace(steps).seconds_left(run.spec.steps - len(steps)) if status == "running" else None,
        step_ms=median(times) if times else None,
        last=steps[-1] if steps else {},
        evidence=None if evidence is None else evidence.as_json(),
        ranks=_ranks(run, world_size, exits),
        waiting=[] if status in ENDED else waits_of(run, exits),
        failure=failure,
        problem=problem,
    )


class _Baselines:
    """The run that each run of an experiment is compared with."""

    def __init__(self, experiment_dir: Path) -> None:
        self._references: dict[str, str] = {}
        for file in (experiment_dir / "ablation.yaml", experiment_dir.with_suffix(".yaml")):
            if file.is_file():
                with contextlib.suppress(WorkbenchError):
                    self._references = {plan.name: plan.reference for plan in load_ablation(file).expand()}
        self._runs = runs_of(experiment_dir, every=True)
        self._by_name: dict[str, list[RunEntry]] = {}
        for entry in self._runs:
            self._by_name.setdefault(entry.name, []).append(entry)

    def of(self, run: Path, name: str) -> RunDirectory | None:
        """The reference that the ablation names, or else the experiment's first run; None if that is this one."""
        reference = self._references.get(name)
        first = self._first if reference is None else self._newest(reference)
        return None if first is None or first.path == run else first

    @functools.cached_property
    def _first(self) -> RunDirectory | None:
        return next((entry.run for entry in self._runs if entry.run), None)

    def _newest(self, name: str) -> RunDirectory | None:
        return next((entry.run for entry in reversed(self._by_name.get(name, [])) if entry.run), None)


def _ranks(run: RunDirectory, world_size: int, exits: dict[int | None, dict[str, Any]]) -> list[RankStatus]:
    views = flight.read_all(run.path / "ranks")
    ranks = []
    for rank in sorted({*range(world_size), *(rank for rank in exits if rank is not None)}):
        log, record = run.log_path(rank), exits.get(rank)
        size = log.stat().st_size if log.is_file() else None
        ended = "" if record is None else "well" if record["ok"] else str(record.get("cause"))
        inside = str(views[rank].inside or "") if rank in views else ""
        ranks.append(RankStatus(rank, size, _last_line(log), ended, inside))
    return ranks


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf8", errors="backslashreplace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def waits_of(run: RunDirectory, exits: Mapping[int | None, Any] | None = None) -> list[WaitStatus]:
    """Return the ranks that are waited for longer than healthy ones, with the stacks that the watchdog recorded.

    Nothing is waited for after the end of a run. `exits` are its exit records by rank, if they have been read.
    """
    if run.status in ENDED:
        return []
    exits = run.exits() if exits is None else exits
    world_size = int(run.state.get("world_size", run.spec.layout.world_size))
    views, now = flight.read_all(run.path / "ranks"), time.time_ns()
    stacks = _stacks(run)
    return [
        WaitStatus(wait.rank, wait.message(now), stacks.get(wait.rank, ""))
        for wait in find_waits(views, range(world_size), [rank for rank in exits if rank is not None])
        if now - wait.entry.entered_ns > _PATIENCE_S * 1e9
    ]


def _stacks(run: RunDirectory) -> dict[int, str]:
    """Stacks of the ranks that others wait for, as the agents of their nodes saw them."""
    stacks: dict[int, str] = {}
    for content in read_of_agents(run.path, WAITING):
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            for each in content["waiting"]:
                if stack := str(each.get("stack", "")):
                    stacks[int(each["rank"])] = stack
    return stacks
