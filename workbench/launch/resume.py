"""Existing runs of an experiment: which are reused or resumed, and what changed since the last launch.

A spec names folders (rollout dataset, checkpoint) and a task, whose content may change. A run directory therefore
stores the identity of its run's inputs, and an earlier run is used only if they are the same.

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
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import workbench
from workbench.atomic import locked, read_json, to_json, write_whole
from workbench.errors import LaunchError, RecordError, SpecError, WorkbenchError, listed
from workbench.launch.ablation import PlannedRun, differences
from workbench.policy.decoder import TINY
from workbench.records.directory import RunDirectory
from workbench.records.integrity import check_whole
from workbench.records.provenance import this_process, versions
from workbench.records.states import ENDED
from workbench.rollouts.task import task_file
from workbench.specs.lora import read_settings
from workbench.specs.losses.own import OwnLoss
from workbench.specs.run import RunSpec
from workbench.user_file import find_file

RECORD = "sweep.json"
_DATA = ("recording", "task", "checkpoint")
MANIFEST, CONFIG = "manifest.json", "config.json"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


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
    newest = next(reversed(_of_settings(runs_dir, plan)), None)
    if newest is None or newest.status != "succeeded":
        return None
    state = newest.state
    return newest if all(state.get(key) == value for key, value in identity.items()) else None


def _of_settings(runs_dir: Path, plan: PlannedRun) -> list[RunDirectory]:
    """Runs of a plan's name and settings, the newest last."""
    settings = plan.spec.content_hash()
    return [run for run in RunDirectory.find(runs_dir, plan.name) if run.spec.content_hash() == settings]


def damage(run: RunDirectory) -> str:
    """Describe missing or unreadable files of a run that succeeded, in a line; "" if it can be reused."""
    try:
        check_whole(run)
    except RecordError as error:
        return f"{error.parts['requested'].removeprefix('read ')}: {error.parts['found']}"
    return ""


def interrupted(runs_dir: Path, plan: PlannedRun, identity: Mapping[str, Any]) -> tuple[RunDirectory | None, str]:
    """Return the unsuccessful run of a plan's settings with the latest checkpoint, and a note for the user.

    Runs before the last success or the last fresh start are ignored. A run of another device or other inputs is not
    resumed, because other steps would follow: the note tells the differences.
    """
    candidates = []
    for run in reversed(_of_settings(runs_dir, plan)):
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
    if busy := [
        f"{run.path.name} ({status}, process {run.state.get('launcher', {}).get('pid', '?')})"
        for plan in planned
        for run in _of_settings(runs_dir, plan)
        if (status := run.status) not in ENDED
    ]:
        raise SpecError(
            f"launch {runs_dir.parent.name}",
            found="already running or waiting: " + ", ".join(busy),
            rule="a configuration runs once at a time in an experiment",
            fix=f"watch them with `workbench status {runs_dir.parent.name}` or Experiment.panel(), or end them with "
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
        differing = [f"{key} {old} -> {new}" for key, (old, new) in differences(before.spec, plan.spec).items()]
        inputs_before = before.state.get("inputs", {})
        if differing := differing + [f"another {key}" for key in _DATA if inputs_before.get(key) != identity.get(key)]:
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


def sweep_identity(planned: Sequence[PlannedRun]) -> str:
    """Eight hex digits of all names and settings: the same for the same sweep, in any order."""
    content = json.dumps(sorted((plan.name, plan.spec.canonical()) for plan in planned))
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def write_record(runs_dir: Path, planned: Sequence[PlannedRun], runs: Sequence[RunDirectory], *, trial: bool) -> None:
    """Record the launch, and the folder of each name's run; the experiment does not use the runs of a trial."""
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
        return read_json(path, requested=f"read {path}", fix="remove the file: the runs are not affected")
    except FileNotFoundError:
        return None


# ---- inputs ----------------------------------------------------------------------------------------------


def identify(specs: Iterable[RunSpec], project: Path) -> list[dict[str, Any]]:
    """Return the identities of each run's inputs: equal if and only if the inputs are the same bytes.

    A hub id and the name of a tiny model are their own identity. No path is stored.

    Raises:
        SpecError: a rollout dataset, checkpoint, task or loss that is missing, with the folder that was searched.
    """
    specs = list(specs)
    paths = dict.fromkeys(spec.data.path for spec in specs if not spec.online.on)
    datasets = {path: _dataset(path, project) for path in paths}
    sources = dict.fromkeys(spec.model.source for spec in specs)
    checkpoints = {source: _checkpoint(source, project) for source in sources}
    software = {"versions": versions(), "code": _code()}
    identities = []
    for spec in specs:
        if (task := spec.online.task) is None:
            data = {"recording": datasets[spec.data.path]}
        else:  # the hash of its file, without its imports
            data = {"task": task if task == "arithmetic" else _sha256(task_file(task, project)[0])}
        if isinstance(spec.loss.surrogate, OwnLoss):  # likewise
            data["loss"] = _sha256(find_file(spec.loss.surrogate.function, project, setting="loss.name"))
        if (adapter := spec.lora.source) is not None:
            read_settings(project / adapter, spec.lora)
            data["adapter"] = " ".join(map(_sha256, sorted((project / adapter).glob("adapter_*"))))
        identities.append(software | {"checkpoint": checkpoints[spec.model.source]} | data)
    return identities


def find_dataset(path: str, project: Path) -> Path:
    """Return the manifest of a rollout dataset; a missing one is a `SpecError`."""
    if not (project / path / MANIFEST).is_file():
        raise _missing(
            "data.path",
            path,
            project,
            f"a folder with {MANIFEST}, as `workbench rollouts import` writes it",
            in_current=(Path(path) / MANIFEST).is_file(),
        )
    return project / path / MANIFEST


def _dataset(path: str, project: Path) -> str:
    """Identity of a rollout dataset: the hash of its manifest, which has the checksums of the tensors."""
    return _sha256(find_dataset(path, project))


def _checkpoint(source: str, project: Path) -> str | list[list[Any]]:
    if (folder := find_checkpoint(source, project)) is None:
        return source
    files = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
    return [[file.name, file.stat().st_size, _sha256(file)] for file in files]


def find_checkpoint(source: str, project: Path) -> Path | None:
    """Return the folder of a checkpoint, None for a hub id or a tiny model; a missing one is a `SpecError`."""
    folder = project / source
    if (folder / CONFIG).is_file():
        if not next(folder.glob("*.safetensors"), None):
            others = sorted(file.name for file in folder.iterdir() if file.name != CONFIG)
            raise SpecError(
                f"model.source = {source!r}",
                found=f"{folder} has no *.safetensors; it holds {listed(others, 4) or 'nothing else'}",
                rule="weights are read from safetensors only: other files may execute code when they are loaded",
                fix="save the model again with model.save_pretrained(folder), which writes safetensors",
            )
        return folder
    in_current = (Path(source) / CONFIG).is_file()
    # owner/name is a hub id, unless a folder of that owner lies here and no model of that name was downloaded: a path
    is_path = "/" in source and folder.parent.is_dir() and not _downloaded(source)
    if in_current or folder.is_dir() or is_path or not _HUB_ID.fullmatch(source):
        raise _missing(
            "model.source",
            source,
            project,
            f"a checkpoint folder with {CONFIG}, a hub id (owner/name), or {' or '.join(TINY)}",
            in_current=in_current,
        )
    return None


def _downloaded(source: str) -> bool:
    """True if the hub's cache on this machine has a model of this id, at the place that huggingface_hub documents."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return (Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{source.replace('/', '--')}").is_dir()


def _code() -> str:
    """One hash over every module of this package."""
    package, digest = Path(workbench.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {_sha256(file)}\n".encode())
    return digest.hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _missing(setting: str, path: str, project: Path, what: str, *, in_current: bool) -> SpecError:
    place = project / path
    file = MANIFEST if setting == "data.path" else CONFIG
    result, fix = (
        f"{place} has no {file}" if place.is_dir() else f"no folder {place}",
        "check the path, or give an absolute one",
    )
    if (place / (CONFIG if file == MANIFEST else MANIFEST)).is_file():
        other = "a checkpoint" if file == MANIFEST else "a rollout dataset"
        result, fix = f"{result}: it is {other}", "model.source and data.path may be swapped; check both"
    if in_current:
        result += f", although there is one in {Path.cwd() / path}, relative to the current folder"
        fix = f"write {setting}: {Path.cwd() / path}"
    return SpecError(
        f"{setting} = {path!r}",
        found=result,
        fix=fix,
        rule=f"{what}; a relative path begins at the project root, {project}: the current folder if it "
        "holds a rollout dataset in data/, else where the workbench's sources lie",
    )
