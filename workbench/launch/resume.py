"""Existing runs of an experiment: which are reused or resumed, and what changed since the last launch.

An experiment's ``runs/sweep.json`` has the last launch and the folder of each name's run. Launching again reuses every
run that succeeded with the same settings, device, rollout dataset (or task), checkpoint and code, and resumes those
that were interrupted and have a checkpoint. A configuration whose settings or data changed is refused rather than run
again under its name: a reader of the report would take the two runs for one. Other code or package versions make a run
outdated, not wrong: it runs again without a question.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import LaunchError, RecordError, SpecError, WorkbenchError
from workbench.launch.ablation import PlannedRun
from workbench.records.directory import ENDED, RunDirectory, from_json, locked, this_process, to_json, write_whole
from workbench.specs.run import flatten

RECORD = "sweep.json"
_DATA = ("recording", "task", "checkpoint")


@contextlib.contextmanager
def launch_lock(runs_dir: Path) -> Iterator[None]:
    """Lock an experiment for one launcher, from looking at its runs to adding new ones.

    Raises:
        LaunchError: nothing can be written there.
    """
    with contextlib.ExitStack() as stack:
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(runs_dir / ".launch.lock"))
        except OSError as error:
            raise LaunchError(
                f"launch {runs_dir.parent.name}",
                found=f"{type(error).__name__}: {error}",
                rule=f"run directories are created under {runs_dir}",
                fix="make the folder writable, or copy the ablation to a folder of your own",
            ) from None
        yield


def reusable(runs_dir: Path, plan: PlannedRun, identity: Mapping[str, Any]) -> RunDirectory | None:
    """Return the newest run of a plan's settings, if it succeeded with the same device and inputs."""
    same = [
        run for run in RunDirectory.find(runs_dir, plan.name) if run.spec.content_hash() == plan.spec.content_hash()
    ]
    if not same or same[-1].status != "succeeded":
        return None
    state = same[-1].state
    return same[-1] if all(state.get(key) == value for key, value in identity.items()) else None


def damage(run: RunDirectory) -> str:
    """Describe missing or unreadable files of a run that succeeded, in a line; "" if it can be reused."""
    try:
        run.check_whole()
    except RecordError as error:
        return f"{error.parts['requested'].removeprefix('read ')}: {error.parts['found']}"
    return ""


def interrupted(runs_dir: Path, plan: PlannedRun, identity: Mapping[str, Any]) -> tuple[RunDirectory | None, str]:
    """Return the unsuccessful run of a plan's settings with the latest checkpoint, and a note for the user.

    Runs before the last success or the last fresh start are ignored. A run of another device or other inputs is not
    resumed, because other steps would follow: the note tells the differences.
    """
    candidates = []
    for run in reversed(RunDirectory.find(runs_dir, plan.name)):
        if run.spec.content_hash() != plan.spec.content_hash():
            continue
        if run.status == "succeeded":
            break
        if run.status in ENDED and run.checkpoints():
            candidates.append(run)
        if run.state.get("fresh"):
            break
    same = [run for run in candidates if not _changed(run.state, identity)]
    if not candidates:
        return None, ""
    latest = max(same or candidates, key=lambda run: max(run.checkpoints()))
    which = f"{latest.path.name} at step {max(latest.checkpoints())}"
    if same:
        return latest, f"resumes from {which}"
    return None, f"starts again, not from {which}: another {', another '.join(_changed(latest.state, identity))}"


def _changed(state: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Keys of an identity that differ from a run's state."""
    before, now = (
        {**{key: source.get(key) for key in identity if key != "inputs"}, **source.get("inputs", {})}
        for source in (state, identity)
    )
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]


def mark_lost(runs_dir: Path, name: str) -> None:
    """Record which runs of a name are lost, so that they stay so even if a pid is reused."""
    for run in RunDirectory.find(runs_dir, name):
        if run.status == "lost":
            run.set_state("lost")


def refuse_running(runs_dir: Path, planned: Sequence[PlannedRun]) -> None:
    """Refuse configurations that are running: two runs of the same name and settings would race.

    Raises:
        SpecError: runs that wait or run, with the process that watches them.
    """
    busy = []
    for plan in planned:
        for run in RunDirectory.find(runs_dir, plan.name):
            if run.status not in ENDED and run.spec.content_hash() == plan.spec.content_hash():
                busy.append(f"{run.path.name} ({run.status}, process {run.state.get('launcher', {}).get('pid', '?')})")
    if busy:
        raise SpecError(
            f"launch {runs_dir.parent.name}",
            found="already running or waiting: " + ", ".join(busy),
            rule="a configuration runs once at a time in an experiment",
            fix=f"watch them with `workbench status {runs_dir.parent.name}` or wb.attach, or end them with "
            f"`workbench cancel {runs_dir.parent.name}`",
        )


def refuse_changed(runs_dir: Path, planned: Sequence[PlannedRun], inputs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse configurations whose settings or data are not those of the last sweep.

    Raises:
        SpecError: the changes, by name and setting.
    """
    recorded = (read_record(runs_dir) or {"runs": {}})["runs"]
    changed = []
    for plan, identity in zip(planned, inputs, strict=True):
        folder = recorded.get(plan.name)
        if folder is None or not (runs_dir / folder).is_dir():
            continue
        try:
            before = RunDirectory.open(runs_dir / folder)
        except WorkbenchError as error:
            changed.append(f"{plan.name}: {folder} is of another version ({error.parts['found']})")
            continue
        differing = _settings_changed(before, plan) + [
            f"another {key}" for key in _DATA if before.state.get("inputs", {}).get(key) != identity.get(key)
        ]
        if differing:
            changed.append(f"{plan.name}: {', '.join(differing)}")
    if changed:
        raise SpecError(
            f"run {runs_dir.parent.name} again",
            found="; ".join(changed),
            rule="a configuration keeps its settings and data while the experiment uses its runs",
            fix="--force (force=True) runs changed configurations again and keeps the old runs; settings on "
            "the command line and --only try something without touching the saved report; another "
            "name makes another configuration",
        )


def _settings_changed(before: RunDirectory, plan: PlannedRun) -> list[str]:
    old, new = (flatten(spec.model_dump(mode="json")) for spec in (before.spec, plan.spec))
    return [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def sweep_identity(planned: Sequence[PlannedRun]) -> str:
    """Eight hex digits of all names and settings: the same for the same sweep, in any order."""
    content = json.dumps(sorted((plan.name, plan.spec.canonical()) for plan in planned))
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def write_record(runs_dir: Path, planned: Sequence[PlannedRun], runs: Sequence[RunDirectory], *, trial: bool) -> None:
    """Record the launch, and the folder of each name's run.

    Args:
        runs_dir: the ``runs`` folder of the experiment.
        planned: the launched runs.
        runs: a directory for each.
        trial: settings override the experiment's own, so the experiment does not use these runs.
    """
    before = read_record(runs_dir) or {"runs": {}}
    folders = {plan.name: run.path.name for plan, run in zip(planned, runs, strict=True)}
    record = {
        "identity": sweep_identity(planned),
        "created_ns": time.time_ns(),
        "launcher": this_process(),
        "latest": folders,
        "runs": before["runs"] | ({} if trial else folders),
    }
    write_whole(runs_dir / RECORD, to_json(record))


def read_record(runs_dir: Path) -> dict[str, Any] | None:
    """Return the record of an experiment's launches, None if there were none.

    It has identity, created_ns and launcher of the last sweep; name -> folder in ``latest``, that sweep's, and in
    ``runs``, those that the experiment uses.

    Raises:
        RecordError: the file is damaged.
    """
    path = runs_dir / RECORD
    try:
        return from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecordError(
            f"read {path}",
            found=f"{type(error).__name__}: {error}",
            rule="a whole JSON file",
            fix="remove the file: the runs are not affected",
        ) from None
