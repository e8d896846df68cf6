"""What a run reads besides its spec: recording or task, the checkpoint, and the code; found, and known by content.

A spec names folders, and a folder may hold something else tomorrow. So a run directory keeps the identity of what
its run read, and an earlier run is taken in place of a new one only if that is the same.
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
    """What each run reads, by content: equal if and only if the inputs are the same bytes.

    A hub id and the name of a tiny model stand for themselves. No path is kept.

    Args:
        specs: of the runs.
        project: folder that relative paths in them begin at.

    Raises:
        SpecError: a recording, checkpoint or task that is not there, with the folder that was searched.
    """
    specs = list(specs)
    recordings = {
        path: _recording(path, project) for path in {spec.data.path: None for spec in specs if not spec.online.on}
    }
    checkpoints = {source: _checkpoint(source, project) for source in {spec.model.source: None for spec in specs}}
    made_by = {"versions": versions(), "code": _code()}
    return [
        made_by
        | {"checkpoint": checkpoints[spec.model.source]}
        | (
            {"recording": recordings[spec.data.path]}
            if spec.online.task is None
            else {"task": _task(spec.online.task, project)}
        )
        for spec in specs
    ]


def _task(name: str, project: Path) -> str:
    """A user's task by its file; what the file imports is not looked at."""
    return name if name == "arithmetic" else _sha256(task_file(name, project)[0])


def _recording(path: str, project: Path) -> str:
    """The manifest vouches for the tensors by their checksum."""
    if not (project / path / MANIFEST).is_file():
        raise _missing(
            "data.path",
            path,
            project,
            f"a folder with {MANIFEST}, as `workbench rollouts import` makes it",
            beside_us=(Path(path) / MANIFEST).is_file(),
        )
    return _sha256(project / path / MANIFEST)


def _checkpoint(source: str, project: Path) -> str | list[list[Any]]:
    folder = project / source
    if (folder / CONFIG).is_file():
        files = [folder / CONFIG, *sorted(folder.glob("*.safetensors"))]
        return [[file.name, file.stat().st_size, _sha256(file)] for file in files]
    beside_us = (Path(source) / CONFIG).is_file()
    if beside_us or folder.is_dir() or not _HUB_ID.fullmatch(source):
        raise _missing(
            "model.source",
            source,
            project,
            f"a checkpoint folder with {CONFIG}, a hub id (owner/name), or {' or '.join(TINY)}",
            beside_us=beside_us,
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


def _missing(setting: str, path: str, project: Path, what: str, *, beside_us: bool) -> SpecError:
    found, fix = f"nothing of that kind at {project / path}", "check the path, or give an absolute one"
    if beside_us:
        found += f", although there is at {Path.cwd() / path}, relative to the current folder"
        fix = f"write {setting}: {Path.cwd() / path}"
    return SpecError(
        f"{setting} = {path!r}",
        found=found,
        fix=fix,
        rule=f"{what}; a relative path begins at the project root, {project}: the current folder if it "
        "holds a folder named data, else where the workbench's sources lie",
    )
