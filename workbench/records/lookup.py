"""Find runs by what a person types: a folder, an experiment's name, or the beginning of a run's name.

Nothing here reads more than a run's settings and state, and torch is not imported, so that looking is quick.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import RecordError, WorkbenchError
from workbench.records.directory import RunDirectory, from_json, project_root

_MOST_NAMED = 12


@dataclass(frozen=True)
class Found:
    """A run directory, or what lies where one should be.

    Attributes:
        path: its folder.
        run: None if it cannot be opened.
        problem: why not, in a line; "" if it can.
        state: the content of its state.json; {} if that cannot be read.
    """

    path: Path
    run: RunDirectory | None
    problem: str = ""
    state: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Name of the configuration; the folder's if nothing else is known."""
        return str(self.state.get("name", self.path.name))

    @property
    def experiment_dir(self) -> Path:
        """The folder of the experiment."""
        return self.path.parent.parent

    @property
    def created_ns(self) -> int:
        """When it was made; of a run that does not say, when its folder last changed."""
        return int(self.state.get("created_ns") or self.path.stat().st_mtime_ns)


@dataclass(frozen=True)
class Target:
    """What somebody asked for.

    Attributes:
        runs: oldest first; at least one.
        experiment: the folder of the experiment if that was asked for, or None if it was one run.
    """

    runs: tuple[Found, ...]
    experiment: Path | None = None

    def opened(self) -> list[RunDirectory]:
        """The runs.

        Raises:
            RecordError: some cannot be opened.
        """
        broken = [f"{_shown(found.path.name)}: {found.problem}" for found in self.runs if found.run is None]
        if broken:
            raise RecordError(
                "open runs",
                found="; ".join(broken),
                rule="whole records of this version's settings",
                fix="move these folders away, or name the runs that you mean",
            )
        return [found.run for found in self.runs if found.run is not None]


def experiment_folder(path: Path) -> Path:
    """Where the runs and report of a file go: beside ``ablation.yaml``, else in a folder of its name."""
    path = path.resolve()
    return path.parent if path.stem == "ablation" else path.parent / path.stem


def experiments(project: Path | None = None) -> list[Path]:
    """The folders under ``experiments`` that hold runs, by name."""
    root = (project or project_root()) / "experiments"
    return sorted({path.parent.parent.parent for path in root.glob("*/runs/*/config.json")})


def runs_of(experiment_dir: Path, *, every: bool = False) -> list[Found]:
    """The runs of an experiment, oldest first.

    Args:
        experiment_dir: the folder that holds ``runs``.
        every: also attempts that a later one of the same name replaces. Otherwise the newest of each name, and those
            that the experiment's ``sweep.json`` names.
    """
    found = sorted(
        (_find(path.parent) for path in (experiment_dir / "runs").glob("*/config.json")),
        key=lambda each: (each.created_ns, each.path.name),
    )
    if every:
        return found
    newest = {each.name: each.path.name for each in found}
    shown = {*newest.values(), *_answering(experiment_dir / "runs")}
    return [each for each in found if each.path.name in shown]


def look_up(asked: str | Path, project: Path | None = None, *, every: bool = False) -> Target:
    """The run or the experiment that somebody means.

    Args:
        asked: the folder of a run or of an experiment, its ablation file, the name of an experiment, or the beginning
            of a run's name or folder, alone or as ``experiment/run``.
        project: the folder that holds ``experiments``; None takes `project_root`.
        every: of an experiment, older attempts too.

    Raises:
        RecordError: nothing of that name, nothing run yet, or several runs that it could mean.
    """
    project = project or project_root()
    for place in (Path(asked), project / "experiments" / asked, project / asked):
        target = _at(place, every)
        if target is not None:
            return target
    return Target((_by_name(str(asked), project),))


def experiment_at(asked: str | Path, project: Path | None = None) -> Path:
    """The folder of the experiment that somebody means, by path or by name.

    Raises:
        RecordError: it holds no runs.
    """
    target = look_up(asked, project)
    if target.experiment is None:
        raise RecordError(
            f"look for the experiment {asked}",
            found="a run",
            rule="the folder of an experiment",
            fix=f"say {_shown(target.runs[0].experiment_dir.name)}, or use `workbench status`",
        )
    return target.experiment


def spelled(run: Path, project: Path | None = None) -> str:
    """What to type for a run, in a shell: ``experiment/folder`` where `look_up` finds that, and its path elsewhere.

    Args:
        run: its folder.
        project: the folder that holds ``experiments``; None takes `project_root`.
    """
    run, here = run.resolve(), Path.cwd()
    if run.parents[2] == (project or project_root()).resolve() / "experiments":
        return shlex.quote(f"{run.parents[1].name}/{run.name}")
    return shlex.quote(str(run.relative_to(here) if run.is_relative_to(here) else run))


def steps_recorded(run: RunDirectory) -> int:
    """How many steps are on disk, counted without reading them: a damaged line counts, a torn last one does not."""
    count = 0
    try:
        with (run.path / "metrics.jsonl").open("rb") as file:
            while block := file.read(1 << 20):
                count += block.count(b"\n")
    except FileNotFoundError:
        pass
    return count


def _find(path: Path) -> Found:
    state: dict[str, Any] = {}
    try:
        run = RunDirectory.open(path)
        state = run.state
        _ = str(state["name"]), str(state["state"]), int(state["created_ns"])
        return Found(path, run, "", state)
    except WorkbenchError as error:
        return Found(path, None, f"{error.parts['found']}", _state_alone(path))
    except (KeyError, TypeError, ValueError) as error:
        return Found(path, None, f"state.json: {type(error).__name__}: {error}", _state_alone(path))


def _state_alone(path: Path) -> dict[str, Any]:
    """The state of a run whose settings cannot be read."""
    try:
        state = from_json((path / "state.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) and isinstance(state.get("created_ns", 0), int) else {}


def _answering(runs_dir: Path) -> set[str]:
    """The folders that the last launches speak of, whether or not a later attempt has their name."""
    try:
        record = from_json((runs_dir / "sweep.json").read_bytes())
        return {str(folder) for key in ("runs", "latest") for folder in record.get(key, {}).values()}
    except (OSError, ValueError, AttributeError):
        return set()


def _at(place: Path, every: bool) -> Target | None:
    """What lies at a path; None if neither a run nor an experiment does."""
    if place.suffix in (".yaml", ".yml") and place.is_file():
        place = experiment_folder(place)
    if (place / "config.json").is_file() and (place / "state.json").is_file():
        return Target((_find(place.resolve()),))
    if place.name == "runs" and any(place.glob("*/config.json")):
        place = place.parent
    if not place.is_dir() or not ((place / "runs").is_dir() or (place / "ablation.yaml").is_file()):
        return None
    place = place.resolve()
    runs = runs_of(place, every=every)
    if not runs:
        raise RecordError(
            f"look for the runs of {_shown(place.name)}",
            found="none yet",
            rule="its folder `runs` holds a folder for each run",
            fix=f"start them: workbench run {_shown(place.name)}/ablation.yaml",
        )
    return Target(tuple(runs), place)


def _by_name(asked: str, project: Path) -> Found:
    """The newest attempt of the one run whose name begins so."""
    every = [found for folder in experiments(project) for found in runs_of(folder, every=True)]
    exact = [found for found in every if asked in _called(found, found.path.name)]
    named = [found for found in every if asked in _called(found, found.name)]
    begun = [
        found for found in every if any(name.startswith(asked) for name in _called(found, found.path.name, found.name))
    ]
    matches = exact or named or begun
    meant = {(found.experiment_dir, found.name): found for found in matches}  # the newest of each stays
    if len(meant) == 1:
        return next(iter(meant.values()))
    if not meant:
        known = {found.name for found in every} | {folder.name for folder in experiments(project)}
        near = [_shown(name) for name in difflib.get_close_matches(asked, known, n=3)]
        raise RecordError(
            f"look for {asked!r}",
            found="no run or experiment of that name",
            rule="a folder, an experiment's name, or the beginning of a run's name",
            fix=f"did you mean {' or '.join(near)}?" if near else "`workbench ls` shows what is there",
        )
    raise RecordError(
        f"look for {asked!r}",
        found=f"{len(meant)} runs: {_listed(meant.values())}",
        rule="a name that means one run",
        fix="say more of it, or experiment/run",
    )


def _called(found: Found, *names: str) -> list[str]:
    return [*names, *(f"{found.experiment_dir.name}/{name}" for name in names)]


def _listed(runs: Iterable[Found]) -> str:
    names = [_shown(f"{found.experiment_dir.name}/{found.path.name}") for found in runs]
    more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])


def _shown(name: str) -> str:
    """A name from the disk, which may hold anything, as it can be printed."""
    return name if name.isprintable() else repr(name)
