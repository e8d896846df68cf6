"""`workbench ls` and `workbench status`: the state of runs, in a line each or in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.cli.terminal import answered, print_lines, safe, safe_lines, size, table, when, width
from workbench.launch.detached import launchers
from workbench.launch.status import Listed, RunStatus, list_runs, listing, status_of, statuses, waits_of
from workbench.records.failures import failure_summary
from workbench.records.lookup import Target, experiment_at, experiments, look_up, shell_name
from workbench.records.states import CLUSTERS, ENDED, STATES
from workbench.report.numbers import GRADIENT_NORM, LOSS, REWARD, duration, significant


def ls(
    experiment_dir: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    every: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="all")] = False,
) -> int:
    """List the runs of all experiments, newest last.

    A run that is recorded as running while no process is left that could end it is lost. Of several attempts of one
    name the newest is shown, and those of the experiment's last launch.

    Args:
        experiment_dir: folders or names of experiments; none for all under experiments/.
        every: Older attempts too.
    """
    listed = list_runs(*experiment_dir, every=every)
    if answered(lambda: [asdict(run) for run in listed]):
        return 0
    if listed:
        print_lines(list_lines(listed, letters=width()))
    else:
        print("no runs yet; begin with: workbench run experiments/layout_parity/ablation.yaml")
    folders = [experiment_at(folder) for folder in experiment_dir] or experiments()
    for folder in dict.fromkeys(folders):  # also one whose runs have all ended, and that compares them
        print_lines(_launcher_lines(folder))
    return 0


def status(
    run_or_experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_EXPERIMENT")],
) -> int:
    """Show the state of a run, or of an experiment.

    Args:
        run_or_experiment: A folder, an experiment's name, or the beginning of a run's name.
    """
    target = look_up(run_or_experiment)
    if answered(lambda: [asdict(status) for status in statuses(target.opened())]):
        return 0
    if target.experiment is not None:
        print_lines(_experiment_lines(target, letters=width()))
    else:
        [run] = target.opened()
        print_lines(_run_lines(status_of(run), letters=width()))
    return 0


def list_lines(listed: Sequence[Listed], *, letters: int | None = None) -> list[str]:
    """Return runs as lines of text, folded to so many letters; None folds nothing."""
    several = len({run.experiment for run in listed}) > 1
    count = Counter((run.experiment, run.name) for run in listed)
    rows = []
    for run in listed:
        name = run.folder if count[run.experiment, run.name] > 1 else run.name
        where = f"{run.ranks} x {run.device}" if run.device and run.ranks else run.device
        rows.append(
            [
                run.experiment if several else "",
                name,
                run.state,
                f"{run.steps_done}/{run.steps}" if run.steps else "",
                when(run.created_ns),
                "" if run.seconds is None else duration(round(run.seconds, 1)),
                ", ".join(filter(None, [where, run.backend])),
                run.why,
            ]
        )
    return table(rows, ("EXPERIMENT", "RUN", "STATE", "STEPS", "WHEN", "TOOK", "WHERE", "WHY"), width=letters)


def _run_lines(status: RunStatus, *, letters: int | None) -> list[str]:
    """Return one run as lines of text, its facts and ranks folded to so many letters."""
    inner = letters and letters - 2
    tables = [*table(list(_facts(status)), width=inner), *table(_rank_rows(status), width=inner)]
    stacks = [
        line
        for wait in status.waiting
        if wait.stack
        for line in ["", f"where rank {wait.rank} is:", *_indented(wait.stack)]
    ]
    return [
        f"{safe(status.experiment)}/{safe(status.folder)}",
        *(f"  {line}" for line in tables),
        *stacks,
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
    ranks = f"{status.world_size} rank{'s' if status.world_size > 1 else ''}{device}"
    backend = f", {status.backend}" if status.backend else ""
    handle = f", {status.handle}" if status.backend in CLUSTERS else ""
    yield "where", ranks + backend + handle + (f" ({status.device_note})" if status.device_note else "")
    if status.scheduler:
        yield "scheduler", safe(status.scheduler)
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


def _rank_rows(status: RunStatus) -> list[list[str]]:
    rows = []
    for rank in status.ranks:
        state = f"ended: {rank.ended}" if rank.ended else f"in {rank.inside}" if rank.inside else ""
        log = "no log" if rank.log_bytes is None else f"log {size(rank.log_bytes)}"
        rows.append([f"rank {rank.rank}", state, log, rank.last_line])
    return rows


def _launcher_lines(experiment_dir: Path) -> list[str]:
    """A line for each detached launcher of an experiment that is alive."""
    name = safe(experiment_dir.name)
    return [
        f"process {launcher.pid} {launcher.doing} {name}, detached; its log: {safe(str(launcher.log))}"
        for launcher in launchers(experiment_dir / "runs")
    ]


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in safe_lines(text.rstrip("\n"))]


def _failure_lines(failure: dict[str, Any] | None) -> list[str]:
    if failure is None:
        return []
    place = ", ".join(f"{axis}={number}" for axis, number in failure.get("coordinates", {}).items())
    also = ", ".join("the agent" if rank is None else str(rank) for rank in failure.get("also_failed", []))
    facts = {
        "cause: ": failure.get("cause"),
        "place: ": place,
        "in:    ": safe(failure.get("waited_in") or ""),
        "after it: ": also,
    }
    lines = ["", f"failed: {safe(failure_summary(failure))}"]
    lines += [f"  {title}{text}" for title, text in facts.items() if text]
    for title, text in (("where it hung", failure.get("stack")), ("traceback", failure.get("traceback"))):
        if text:
            lines += ["", f"{title}:", *_indented(str(text))]
    return lines


def _experiment_lines(target: Target, *, letters: int | None) -> list[str]:
    """Return an experiment as lines of text: counts, its runs, and how to look at a failed one."""
    listed = [listing(entry) for entry in target.runs]
    count = Counter(run.state for run in listed)
    tally = ", ".join(f"{count[state]} {state}" for state in (*STATES, "unreadable") if count[state])
    lines = [
        f"{safe(target.runs[0].experiment_dir.name)}: {len(listed)} runs, {tally}",
        "",
        *list_lines(listed, letters=letters),
    ]
    lines += ["", *detached] if (detached := _launcher_lines(target.runs[0].experiment_dir)) else []
    live = [entry for entry, run in zip(target.runs, listed, strict=True) if entry.run and run.state not in ENDED]
    waits = [(entry, wait) for entry in live if entry.run for wait in waits_of(entry.run)]
    lines += [f"{safe(entry.name)}: {safe(wait.message)}" for entry, wait in waits]
    if broken := next((entry for entry, run in zip(target.runs, listed, strict=True) if run.state == "failed"), None):
        lines += ["", f"`workbench status {safe(shell_name(broken.path))}` shows a failure with its traceback"]
    return lines
