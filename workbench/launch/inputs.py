"""Inputs of a run besides its spec: rollout dataset or task, checkpoint and code, identified by content.

A spec names folders, whose content may change. A run directory therefore stores the identity of its run's inputs, and
an earlier run is reused in place of a new one only if they are the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import workbench
from workbench.errors import SpecError
from workbench.policy.tiny import TINY
from workbench.records.directory import versions
from workbench.rollouts.task import task_file
from workbench.specs.run import RunSpec

MANIFEST, CONFIG = "manifest.json", "config.json"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def identify(specs: Iterable[RunSpec], project: Path) -> list[dict[str, Any]]:
    """Return the identities of each run's inputs: equal if and only if the inputs are the same bytes.

    A hub id and the name of a tiny model are their own identity. No path is stored.

    Args:
        specs: of the runs.
        project: folder that their paths are relative to.

    Raises:
        SpecError: a rollout dataset, checkpoint or task that is missing, with the folder that was searched.
    """
    specs = list(specs)
    datasets = {
        path: _dataset(path, project) for path in {spec.data.path: None for spec in specs if not spec.online.on}
    }
    checkpoints = {source: _checkpoint(source, project) for source in {spec.model.source: None for spec in specs}}
    software = {"versions": versions(), "code": _code()}
    return [
        software
        | {"checkpoint": checkpoints[spec.model.source]}
        | (
            {"recording": datasets[spec.data.path]}
            if spec.online.task is None
            else {"task": _task(spec.online.task, project)}
        )
        for spec in specs
    ]


def _task(name: str, project: Path) -> str:
    """Identity of a user's task: the hash of its file, without its imports."""
    return name if name == "arithmetic" else _sha256(task_file(name, project)[0])


def _dataset(path: str, project: Path) -> str:
    """Identity of a rollout dataset: the hash of its manifest, which has the checksums of the tensors."""
    if not (project / path / MANIFEST).is_file():
        raise _missing(
            "data.path",
            path,
            project,
            f"a folder with {MANIFEST}, as `workbench rollouts import` writes it",
            in_current=(Path(path) / MANIFEST).is_file(),
        )
    return _sha256(project / path / MANIFEST)


def _checkpoint(source: str, project: Path) -> str | list[list[Any]]:
    folder = project / source
    if (folder / CONFIG).is_file():
        files = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
        return [[file.name, file.stat().st_size, _sha256(file)] for file in files]
    in_current = (Path(source) / CONFIG).is_file()
    if in_current or folder.is_dir() or not _HUB_ID.fullmatch(source):
        raise _missing(
            "model.source",
            source,
            project,
            f"a checkpoint folder with {CONFIG}, a hub id (owner/name), or {' or '.join(TINY)}",
            in_current=in_current,
        )
    return source


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
    result, fix = f"nothing of that kind at {project / path}", "check the path, or give an absolute one"
    if in_current:
        result += f", although there is at {Path.cwd() / path}, relative to the current folder"
        fix = f"write {setting}: {Path.cwd() / path}"
    return SpecError(
        f"{setting} = {path!r}",
        found=result,
        fix=fix,
        rule=f"{what}; a relative path begins at the project root, {project}: the current folder if it "
        "holds a folder named data, else where the workbench's sources lie",
    )
