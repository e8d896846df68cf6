"""`workbench status`: show the state of a run, or of an experiment."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

from workbench.cli.ls import lines_of, listing, seconds
from workbench.cli.terminal import print_lines, safe, safe_lines, size, table, when, width
from workbench.errors import RecordError, WorkbenchError
from workbench.launch.ablation import load_ablation
from workbench.launch.waits import find_waits
from workbench.metrics.evidence import Evidence
from workbench.records.directory import ENDED, STATES, RunDirectory, failure_summary, from_json, to_json
from workbench.records.lookup import RunEntry, Target, look_up, runs_of, shell_name, steps_recorded
from workbench.records.progress import CONTINUES, Pace
from workbench.report.numbers import significant
from workbench.report.trial import GRADIENT_NORM, LOSS, REWARD, duration
from workbench.sharding import flight
from workbench.specs.run import flatten

_TAIL_BYTES = 16 * 1024  # only the last line of a log is shown
_PATIENCE_S = 5.0  # healthy ranks wait for one another too, but not for that long
_CLUSTERS = ("slurm", "kubernetes")


@dataclass(frozen=True)
class RankStatus:
    """State of one rank.

    Attributes:
        rank: number of the rank.
        log_bytes: size of its log; None if there is none.
        last_line: the last line of its log that is not empty.
        ended: its end: "well", one of `workbench.records.directory.CAUSES`, or "" if it recorded none.
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
        rank: the rank that is waited for.
        message: the collective, the waiting ranks, the duration, and what the rank did instead.
        stack: its Python stack, if the watchdog of the run recorded it; "" otherwise.
    """

    rank: int
    message: str
    stack: str


@dataclass(frozen=True)
class RunStatus:
    """State of a run.

    Attributes:
        experiment: name of the folder that holds its ``runs``.
        name: of the configuration.
        folder: name of the run's own folder.
        state: one of `workbench.records.directory.STATES`.
        cancel_requested: True if its cancellation was requested.
        created_ns: time of the request.
        started_ns: start of its first rank; None before.
        ended_ns: end; None before.
        seconds: its duration, so far if it runs.
        steps_done: optimizer steps recorded.
        steps: optimizer steps in all.
        world_size: its ranks.
        device: device type of its ranks.
        device_note: why this device, "" if it is the requested one.
        backend: what launched its ranks.
        handle: the scheduler's name of the job, "" if none.
        continues: folder of the run that it continues, and from which step; "" if none.
        compared_with: name of the baseline run; "" if it is this one.
        settings: setting -> its values in the baseline run and in this one, where they differ.
        seconds_left: estimate by the pace of its last steps; None if it does not run, or too few have ended.
        step_ms: median time of a step, without the first, which warms up; None without others.
        last: the last step's record; {} if there is none.
        evidence: of all recorded steps, as `workbench.metrics.evidence.Evidence.as_json` has it: tokens and documents
            with a gradient, why a comparison would be vacuous, warnings; None for records without counts.
        ranks: state of each rank.
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


def describe(query: str | Path, *, project: Path | None = None) -> list[RunStatus]:
    """Return the state of a run, or of every run of an experiment, oldest first.

    Args:
        query: see `workbench.records.lookup.look_up`.
        project: the folder that holds ``experiments``; None takes `project_root`.

    Raises:
        RecordError: nothing of that name, or runs that cannot be opened.
    """
    target = look_up(query, project)
    return [_describe(run, entry.experiment_dir) for entry, run in zip(target.runs, target.opened(), strict=True)]


def _describe(run: RunDirectory, experiment_dir: Path) -> RunStatus:
    status, state = run.status, run.state  # read before the records, so that no step before an end is missed
    problem, steps = "", []
    try:
        steps = run.steps()
    except RecordError as error:
        problem = error.parts["found"]
        with contextlib.suppress(RecordError):
            steps = run.steps(partial=True)
    try:
        failure, exits = run.failure(), run.exits()
    except (WorkbenchError, KeyError) as error:
        failure, exits, problem = None, {}, f"how its ranks ended: {error}"
    baseline = _baseline(run, experiment_dir)
    world_size = int(state.get("world_size", run.spec.layout.world_size))
    evidence = Evidence.of_steps(steps)
    times = [record["time/step_ms"] for record in steps[1:] if "time/step_ms" in record]
    return RunStatus(
        experiment=experiment_dir.name,
        name=run.name,
        folder=run.path.name,
        state=status,
        cancel_requested=run.cancel_requested,
        created_ns=int(state.get("created_ns", 0)),
        started_ns=state.get("started_ns"),
        ended_ns=state.get("ended_ns"),
        seconds=seconds(state, status),
        steps_done=len(steps) if not problem else steps_recorded(run),
        steps=run.spec.steps,
        world_size=world_size,
        device=str(state.get("device", "")),
        device_note=str(state.get("device_note", "")),
        backend=str(state.get("backend", "")),
        handle=str(state.get("handle", "")),
        continues=_continues(state, steps),
        compared_with=baseline.name if baseline else "",
        settings=settings_that_differ(baseline, run) if baseline else {},
        seconds_left=Pace(steps).seconds_left(run.spec.steps - len(steps)) if status == "running" else None,
        step_ms=median(times) if times else None,
        last=steps[-1] if steps else {},
        evidence=evidence and evidence.as_json(),
        ranks=_ranks(run, world_size, exits),
        waiting=[] if status in ENDED else _waiting(run, world_size, exits),
        failure=failure,
        problem=problem,
    )


def _continues(state: dict[str, Any], steps: Sequence[dict[str, Any]]) -> str:
    since = next((f" from step {record['step']}" for record in steps if CONTINUES in record), "")
    return f"with {state['continues']}{since}" if "continues" in state else ""


def settings_that_differ(baseline: RunDirectory, run: RunDirectory) -> dict[str, list[Any]]:
    """Return setting -> its values in the baseline run and in another, where they differ."""
    before, after = (flatten(each.spec.model_dump(mode="json")) for each in (baseline, run))
    return {
        key: [before.get(key), after.get(key)]
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def _baseline(run: RunDirectory, experiment_dir: Path) -> RunDirectory | None:
    """Return the run to compare with: the reference that the ablation names, or else the experiment's first."""
    name: str | None = None
    for file in (experiment_dir / "ablation.yaml", experiment_dir.with_suffix(".yaml")):
        if file.is_file():
            try:
                name = {plan.name: plan.reference for plan in load_ablation(file).expand()}.get(run.name)
            except WorkbenchError:
                continue
    if name == "":
        return None
    others = [entry.run for entry in runs_of(experiment_dir, every=True) if entry.run]
    if name is not None:
        others = [other for other in others if other.name == name][-1:]
    first = others[0] if others else None
    return None if first is None or first.path == run.path else first


def _ranks(run: RunDirectory, world_size: int, exits: dict[int | None, dict[str, Any]]) -> list[RankStatus]:
    views = flight.read_all(run.path / "ranks")
    numbers = sorted({*range(world_size), *(rank for rank in exits if rank is not None)})
    ranks = []
    for rank in numbers:
        log, record = run.log_path(rank), exits.get(rank)
        inside = views[rank].inside if rank in views else None
        ranks.append(
            RankStatus(
                rank,
                log.stat().st_size if log.is_file() else None,
                _last_line(log),
                "" if record is None else "well" if record["ok"] else str(record.get("cause")),
                str(inside) if inside else "",
            )
        )
    return ranks


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode("utf8", errors="backslashreplace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _waiting(run: RunDirectory, world_size: int, exits: dict[int | None, dict[str, Any]]) -> list[WaitStatus]:
    """Return the ranks that are waited for longer than healthy ones, with the stacks that the watchdog recorded."""
    views, now = flight.read_all(run.path / "ranks"), time.time_ns()
    waits = find_waits(views, range(world_size), [rank for rank in exits if rank is not None])
    stacks = _stacks(run)
    return [
        WaitStatus(wait.rank, wait.message(now), stacks.get(wait.rank, ""))
        for wait in waits
        if now - wait.entry.entered_ns > _PATIENCE_S * 1e9
    ]


def _stacks(run: RunDirectory) -> dict[int, str]:
    try:
        waiting = from_json((run.path / "ranks" / "waiting.json").read_bytes())["waiting"]
        return {int(each["rank"]): str(each.get("stack", "")) for each in waiting}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


# ---- as text -------------------------------------------------------------------------------------------


def lines_of_run(status: RunStatus) -> list[str]:
    """Return one run as lines of text."""
    return [
        f"{safe(status.experiment)}/{safe(status.folder)}",
        *_in_columns(_facts(status)),
        *_rank_lines(status),
        *_stack_lines(status),
        *_failure_lines(status.failure),
    ]


def _facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    cancelling = ", cancellation requested" if status.cancel_requested and status.state not in ENDED else ""
    took = f", {duration(round(status.seconds, 1))}" if status.seconds is not None else ""
    left = f", about {duration(round(status.seconds_left))} left" if status.seconds_left is not None else ""
    yield "state", f"{status.state}{cancelling}, {status.steps_done} of {status.steps} steps{took}{left}"
    if status.state == "lost":
        yield "", "no process is left that could end it; run it again to finish what is missing"
    moments = (("requested", status.created_ns), ("began", status.started_ns), ("ended", status.ended_ns))
    yield "when", ", ".join(f"{what} {when(moment)}" for what, moment in moments if moment)
    device = f" on {status.device}" if status.device else ""
    yield (
        "where",
        "".join(
            [
                f"{status.world_size} rank{'s' if status.world_size > 1 else ''}{device}",
                f", {status.backend}" if status.backend else "",
                f", {status.handle}" if status.backend in _CLUSTERS else "",
                f" ({status.device_note})" if status.device_note else "",
            ]
        ),
    )
    if status.continues:
        yield "continues", status.continues
    if status.last:
        loss, norm = (significant(status.last.get(key), 6) for key in (LOSS, GRADIENT_NORM))
        reward = f", reward {significant(status.last[REWARD], 3)}" if REWARD in status.last else ""
        yield f"step {status.last.get('step', '?')}", f"loss {loss}, gradient norm {norm}{reward}"
    if status.evidence:
        yield "evidence", status.evidence["summary"]
        if status.evidence["nothing"]:
            yield "", f"vacuous: {status.evidence['nothing']}"
        yield from (("", f"warning: {warning}") for warning in status.evidence["warnings"])
    if status.step_ms is not None:
        yield "step time", f"{status.step_ms:.1f} ms (median without the first)"
    if status.compared_with:
        changes = [f"{key}: {before} -> {after}" for key, (before, after) in status.settings.items()]
        yield "settings", f"as {status.compared_with}" + (", but" if changes else "")
        yield from (("", change) for change in changes)
    yield from (("waiting", wait.message) for wait in status.waiting)
    if status.problem:
        yield "damaged", status.problem


def _in_columns(facts: Iterator[tuple[str, str]]) -> list[str]:
    return [f"  {line}" for line in table(list(facts))]


def _rank_lines(status: RunStatus) -> list[str]:
    rows = [
        [
            f"rank {rank.rank}",
            _rank_state(rank),
            "no log" if rank.log_bytes is None else f"log {size(rank.log_bytes)}",
            rank.last_line,
        ]
        for rank in status.ranks
    ]
    return [f"  {line}" for line in table(rows)]


def _rank_state(rank: RankStatus) -> str:
    if rank.ended:
        return f"ended: {rank.ended}"
    return f"in {rank.inside}" if rank.inside else ""


def _stack_lines(status: RunStatus) -> list[str]:
    return [
        line
        for wait in status.waiting
        if wait.stack
        for line in ["", f"where rank {wait.rank} is:", *_indented(wait.stack)]
    ]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in safe_lines(text.rstrip("\n"))]


def _failure_lines(failure: dict[str, Any] | None) -> list[str]:
    if failure is None:
        return []
    place = ", ".join(f"{axis}={number}" for axis, number in failure.get("coordinates", {}).items())
    also = ", ".join("the agent" if rank is None else str(rank) for rank in failure.get("also_failed", []))
    lines = ["", f"failed: {safe(failure_summary(failure))}"]
    lines += [
        line
        for line in (
            f"  cause: {failure['cause']}" if failure.get("cause") else "",
            f"  place: {place}" if place else "",
            f"  in:    {safe(failure['waited_in'])}" if failure.get("waited_in") else "",
            f"  after it: {also}" if also else "",
        )
        if line
    ]
    for title, text in (("where it hung", failure.get("stack")), ("traceback", failure.get("traceback"))):
        if text:
            lines += ["", f"{title}:", *_indented(str(text))]
    return lines


def lines_of_experiment(target: Target, *, letters: int | None = None) -> list[str]:
    """Return an experiment as lines of text: counts, its runs, and how to look at a failed one."""
    listed = [listing(entry) for entry in target.runs]
    count = Counter(run.state for run in listed)
    tally = ", ".join(f"{count[state]} {state}" for state in (*STATES, "unreadable") if count[state])
    lines = [
        f"{safe(target.runs[0].experiment_dir.name)}: {len(listed)} runs, {tally}",
        "",
        *lines_of(listed, letters=letters),
    ]
    lines += [f"{safe(entry.name)}: {safe(wait.message)}" for entry in target.runs for wait in _waits_of(entry)]
    if broken := next((entry for entry, run in zip(target.runs, listed, strict=True) if run.state == "failed"), None):
        lines += ["", f"`workbench status {safe(shell_name(broken.path))}` shows a failure with its traceback"]
    return lines


def _waits_of(entry: RunEntry) -> list[WaitStatus]:
    if entry.run is None or entry.run.status in ENDED:
        return []
    world_size = int(entry.state.get("world_size", entry.run.spec.layout.world_size))
    return _waiting(entry.run, world_size, entry.run.exits())


def _status(
    run_or_experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_EXPERIMENT")],
    *,
    json: bool = False,
) -> int:
    """Show the state of a run, or of an experiment.

    Args:
        run_or_experiment: A folder, an experiment's name, or the beginning of a run's name.
        json: Print a JSON list, of an experiment with the full state of every run.
    """
    if json:
        print(to_json([asdict(status) for status in describe(run_or_experiment)]).decode(), end="")
        return 0
    target = look_up(run_or_experiment)
    if target.experiment is not None:
        print_lines(lines_of_experiment(target, letters=width()))
    else:
        [run] = target.opened()
        print_lines(lines_of_run(_describe(run, target.runs[0].experiment_dir)))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run `workbench status`."""
    return tyro.cli(_status, args=list(arguments), prog="workbench status", config=(tyro.conf.FlagCreatePairsOff,))
