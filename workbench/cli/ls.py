"""`workbench ls`: list the runs of all experiments, newest last."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.terminal import print_lines, table, when, width
from workbench.errors import WorkbenchError
from workbench.records.directory import ENDED, failure_summary, to_json
from workbench.records.lookup import RunEntry, experiment_at, experiments, runs_of, steps_recorded
from workbench.report.trial import duration


@dataclass(frozen=True)
class Listed:
    """A run in a list.

    Attributes:
        experiment: name of the folder that holds its ``runs``.
        name: of the configuration.
        folder: name of the run's own folder.
        state: one of `workbench.records.directory.STATES`, or "unreadable".
        steps_done: optimizer steps recorded.
        steps: optimizer steps in all.
        created_ns: time of the request.
        seconds: from the start of its first rank until its end, or until now; None before and if unknown.
        ranks: its world size; 0 if unknown.
        device: "cpu", "cuda", or "" if unknown.
        backend: what launched its ranks, "" if unknown.
        why: cause of the failure, or why it cannot be read, in a line; "" otherwise.

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
    common = {
        "experiment": entry.experiment_dir.name,
        "name": entry.name,
        "folder": entry.path.name,
        "created_ns": entry.created_ns,
        "ranks": int(state.get("world_size", 0)),
        "device": str(state.get("device", "")),
        "backend": str(state.get("backend", "")),
    }
    if run is None:
        return Listed(state="unreadable", steps_done=0, steps=0, seconds=None, why=entry.problem, **common)
    status = run.status
    return Listed(
        state=status,
        steps_done=steps_recorded(run),
        steps=run.spec.steps,
        why=_why(entry, status),
        seconds=seconds(state, status),
        **common | {"ranks": common["ranks"] or run.spec.layout.world_size},
    )


def seconds(state: dict[str, int], status: str) -> float | None:
    """Return the duration of a run, so far if it runs; None before it began, and if its end was not recorded."""
    if "started_ns" not in state or (status in ENDED and "ended_ns" not in state):
        return None
    return round((state["ended_ns"] if status in ENDED else time.time_ns()) / 1e9 - state["started_ns"] / 1e9, 3)


def _why(entry: RunEntry, status: str) -> str:
    if entry.run is None or status not in ("failed", "lost"):
        return ""
    try:
        failure = entry.run.failure()
    except WorkbenchError as error:
        return error.parts["found"]
    if failure:
        return failure_summary(failure)
    return "no process is left that could end it" if status == "lost" else "no rank recorded a cause"


def lines_of(listed: Sequence[Listed], *, letters: int | None = None) -> list[str]:
    """Return runs as lines of text.

    Args:
        listed: the runs.
        letters: width of a line; None cuts nothing.
    """
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


def _ls(
    experiment_dir: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
    json: bool = False,
) -> int:
    """List the runs of all experiments, newest last.

    A run that is recorded as running while no process is left that could end it is lost. Of several attempts of one
    name the newest is shown, and those of the experiment's last launch.

    Args:
        experiment_dir: folders or names of experiments; none for all under experiments/.
        every: Older attempts too.
        json: Print a JSON list.
    """
    listed = list_runs(*experiment_dir, every=every)
    if json:
        print(to_json([asdict(run) for run in listed]).decode(), end="")
    elif listed:
        print_lines(lines_of(listed, letters=width()))
    else:
        print("no runs yet; begin with: workbench run experiments/layout_parity/ablation.yaml")
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run `workbench ls`."""
    return tyro.cli(_ls, args=list(arguments), prog="workbench ls", config=(tyro.conf.FlagCreatePairsOff,))
