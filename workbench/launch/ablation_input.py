"""The file of an ablation, from what a user gives to `workbench.experiment.Experiment`: a path, a name or settings."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from workbench.atomic import write_whole
from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec, ablation_file, load_ablation, lookup
from workbench.losses.from_notebook import written_losses
from workbench.records.directory import RUN_NAME
from workbench.records.provenance import PACKAGED
from workbench.specs.reading import merge, read_yaml


def named_folder(name: str | None, folder: Path | str | None, project: Path) -> Path | str | None:
    """Return the folder of an experiment of that name; without a name, the one given."""
    if name is None:
        return folder
    if folder is not None or not RUN_NAME.fullmatch(name):
        raise SpecError(
            f"experiment {name!r}",
            found="a name and a folder" if folder is not None else "a name that cannot be a folder's",
            rule="a name of letters, digits, '.', '_' and '-', beginning with a letter or digit, or else a folder",
            fix="leave folder out: the name decides it" if folder is not None else 'such as name="my_question"',
        )
    # An installed package is no place for results: there the project is where the user is.
    return (Path.cwd() if project == PACKAGED else project) / "experiments" / name


def file_of(ablation: Path | str | Mapping[str, Any], folder: Path | str | None, project: Path) -> Path:
    """Return the file of an ablation; settings are written to ``ablation.yaml`` of their folder."""
    if not isinstance(ablation, Mapping):
        if folder is not None:
            raise SpecError(
                f"experiment {ablation} in {folder}",
                found="a file and a folder (or a name)",
                rule="a file's experiment lies next to the file",
                fix="leave folder and name out, or pass the settings",
            )
        return ablation_file(ablation, project)
    place = Path(tempfile.mkdtemp(prefix="workbench-") if folder is None else folder)
    sources: dict[Path, str] = {}

    def write(name: str, text: str) -> str:
        path = (place / f"{name}.py").resolve()
        sources[path] = text
        return str(path.relative_to(project) if path.is_relative_to(project) else path)

    ablation = written_losses(ablation, write)
    load_ablation(ablation)  # before anything is written
    try:
        text = yaml.safe_dump(ablation, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise SpecError(
            "experiment from settings",
            found=f"{error}".partition("\n")[0],
            rule="settings are text, numbers, booleans, lists and mappings, as in YAML",
            fix="convert the value",
        ) from None
    path = place / "ablation.yaml"
    if path.is_file() and read_yaml(path) != yaml.safe_load(text):
        raise SpecError(
            f"experiment in {path.parent}",
            found="an ablation.yaml with other settings",
            rule="a folder has one ablation",
            fix="use another name or folder, or Experiment(folder, changes=...)",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, source in sources.items():
        write_whole(file, source.encode())
    return write_whole(path, text.encode())


def with_changes(ablation: AblationSpec, changes: Mapping[str, Any], *, where: str) -> AblationSpec:
    """Merge settings over the base of an ablation; raise an error for those that an axis overrides."""
    for axis in ablation.axes:
        if (value := lookup(changes, axis)) is not None:
            raise SpecError(
                f"{where}: set {axis} = {value} for every run",
                found=f"{axis} is an axis",
                rule="an axis gives every configuration its values",
                fix="use --only to choose runs, or change the axis in the file",
            )
    return ablation.model_copy(update={"base": merge(ablation.base, changes)})
