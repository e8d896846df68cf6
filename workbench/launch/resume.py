"""What an experiment has already: which runs may stand for new ones, and what changed since the last time.

An experiment's ``runs/sweep.json`` says what was launched last, and which folder answers for which name. Launching
again takes every run that succeeded with the same settings, device, recording (or task), checkpoint and code, and
continues those that were interrupted and had kept a checkpoint. A configuration
whose settings or data changed is refused rather than run beside its namesake: whoever reads the report would take the
two for one. Other code or other package versions make a run old, not wrong: it is run again without a question.
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
from workbench.launch.ablation import Planned
from workbench.records.directory import ENDED, RunDirectory, from_json, locked, this_process, to_json, write_whole
from workbench.specs.run import flatten

RECORD = "sweep.json"
_DATA = ("recording", "task", "checkpoint")


@contextlib.contextmanager
def alone(runs_dir: Path) -> Iterator[None]:
    """One launcher at a time looks at what an experiment has and adds to it: between the two nobody else may.

    Raises:
        LaunchError: nothing can be written there.
    """
    with contextlib.ExitStack() as held:
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(runs_dir / ".launch.lock"))
        except OSError as error:
            raise LaunchError(
                f"launch {runs_dir.parent.name}",
                found=f"{type(error).__name__}: {error}",
                rule=f"run directories are made under {runs_dir}",
                fix="make the folder writable, or copy the ablation to a folder of your own",
            ) from None
        yield


def reusable(runs_dir: Path, plan: Planned, identity: Mapping[str, Any]) -> RunDirectory | None:
    """The newest run of a plan's settings, if it succeeded and its state says the same device and inputs."""
    same = [
        run for run in RunDirectory.find(runs_dir, plan.name) if run.spec.content_hash() == plan.spec.content_hash()
    ]
    if not same or same[-1].status != "succeeded":
        return None
    state = same[-1].state
    return same[-1] if all(state.get(key) == value for key, value in identity.items()) else None


def damage(run: RunDirectory) -> str:
    """What a run that succeeded lacks or what of it cannot be read, in a line; "" if it can stand for a new one."""
    try:
        run.check_whole()
    except RecordError as error:
        return f"{error.parts['asked'].removeprefix('read ')}: {error.parts['found']}"
    return ""


def interrupted(runs_dir: Path, plan: Planned, identity: Mapping[str, Any]) -> tuple[RunDirectory | None, str]:
    """The run of a plan's settings that came furthest, kept a checkpoint, and did not succeed; and what is to be said.

    None from before the last one that succeeded, or that was asked to begin anew; and none of another device or other
    inputs, whose steps are not those that would follow: that is said, with what differs.
    """
    kept = []
    for run in reversed(RunDirectory.find(runs_dir, plan.name)):
        if run.spec.content_hash() != plan.spec.content_hash():
            continue
        if run.status == "succeeded":
            break
        if run.status in ENDED and run.checkpoints():
            kept.append(run)
        if run.state.get("fresh"):
            break
    same = [run for run in kept if not _unlike(run.state, identity)]
    if not kept:
        return None, ""
    furthest = max(same or kept, key=lambda run: max(run.checkpoints()))
    which = f"{furthest.path.name} from step {max(furthest.checkpoints())}"
    if same:
        return furthest, f"goes on with {which}"
    return None, f"begins anew, and not with {which}: another {', another '.join(_unlike(furthest.state, identity))}"


def _unlike(state: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """What of an identity a run's state says otherwise, by name."""
    before, now = (
        {**{key: of.get(key) for key in identity if key != "inputs"}, **of.get("inputs", {})}
        for of in (state, identity)
    )
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]


def bury_the_lost(runs_dir: Path, name: str) -> None:
    """Write down which runs of a name were lost, so that they stay so whatever pid comes next."""
    for run in RunDirectory.find(runs_dir, name):
        if run.status == "lost":
            run.set_state("lost")


def refuse_running(runs_dir: Path, planned: Sequence[Planned]) -> None:
    """Refuse to run what somebody is running: two of a name and settings would race for the same answer.

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
            found="already on their way: " + ", ".join(busy),
            rule="a configuration runs once at a time in an experiment",
            fix=f"watch them with `workbench status {runs_dir.parent.name}` or wb.attach, or end them with "
            f"`workbench cancel {runs_dir.parent.name}`",
        )


def refuse_changed(runs_dir: Path, planned: Sequence[Planned], inputs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse configurations whose settings or data are not those of the last sweep.

    Raises:
        SpecError: what changed, name by name and setting by setting.
    """
    answering = (read_record(runs_dir) or {"runs": {}})["runs"]
    changed = []
    for plan, read in zip(planned, inputs, strict=True):
        folder = answering.get(plan.name)
        if folder is None or not (runs_dir / folder).is_dir():
            continue
        try:
            before = RunDirectory.open(runs_dir / folder)
        except WorkbenchError as error:
            changed.append(f"{plan.name}: {folder} is of another version ({error.parts['found']})")
            continue
        differing = _settings_changed(before, plan) + [
            f"another {what}" for what in _DATA if before.state.get("inputs", {}).get(what) != read.get(what)
        ]
        if differing:
            changed.append(f"{plan.name}: {', '.join(differing)}")
    if changed:
        raise SpecError(
            f"run {runs_dir.parent.name} again",
            found="; ".join(changed),
            rule="a configuration keeps its settings and data while its runs answer for it",
            fix="--force (force=True) runs what changed anew and keeps the old runs beside it; settings on "
            "the command line and --only try something without touching the saved report; another "
            "name makes another configuration",
        )


def _settings_changed(before: RunDirectory, plan: Planned) -> list[str]:
    old, new = (flatten(spec.model_dump(mode="json")) for spec in (before.spec, plan.spec))
    return [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def sweep_identity(planned: Sequence[Planned]) -> str:
    """Eight hex digits of every name with its settings: the same for the same sweep, in whatever order."""
    content = json.dumps(sorted((plan.name, plan.spec.canonical()) for plan in planned))
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def write_record(runs_dir: Path, planned: Sequence[Planned], runs: Sequence[RunDirectory], *, trial: bool) -> None:
    """Note what is being launched, and which folder answers for which name.

    Args:
        runs_dir: the ``runs`` folder of the experiment.
        planned: what is being launched.
        runs: a directory for each.
        trial: settings were laid over the experiment's own, so these runs answer for nothing.
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
    """What was launched in an experiment, name by name, or None if nothing was.

    The record holds identity, created_ns and launcher of the last sweep; name -> folder in ``latest``, that sweep's,
    and in ``runs``, those that answer for the experiment.

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
            fix="remove the file: the runs beside it are not affected",
        ) from None
