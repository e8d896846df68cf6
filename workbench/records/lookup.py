"""Find runs by what a user types: a folder, an experiment's name, or the beginning of a run's name.

Only a run's settings and state are read, and torch is not imported, so that a lookup is quick.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.atomic import from_json
from workbench.errors import RecordError, WorkbenchError, did_you_mean
from workbench.records.damage import STATE_TYPES, check_types
from workbench.records.directory import RunDirectory
from workbench.records.provenance import project_root
from workbench.records.states import read_state

_MOST_NAMED = 12  # runs that a message lists
_HERE = (
    "",
    "*/",
    "*/*/",
)  # of the current folder: its own runs, those of my.yaml, of experiments/mine, of folder/my.yaml


class RunEntry:
    """A run directory, or a folder that should be one.

    Its files are read when something needs them, each once: the state for a name, the settings for `run`. So a search
    among many runs parses the settings only of those that it returns.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        """Its folder."""
        return f"RunEntry({self.path})"

    @functools.cached_property
    def _state(self) -> tuple[dict[str, Any], str]:
        """The content of state.json and "", or what can be read of it and the problem."""
        try:
            state = read_state(self.path)
            _ = int(state["created_ns"])
        except WorkbenchError as error:
            return _state_alone(self.path), str(error.parts["found"])
        except (KeyError, TypeError, ValueError) as error:
            return _state_alone(self.path), f"state.json: {type(error).__name__}: {error}"
        return state, ""

    @functools.cached_property
    def _run(self) -> tuple[RunDirectory | None, str]:
        try:
            run = RunDirectory(self.path, RunDirectory.read_spec(self.path))
        except WorkbenchError as error:
            return None, str(error.parts["found"])
        _, problem = self._state
        return (None, problem) if problem else (run, "")

    @property
    def state(self) -> dict[str, Any]:
        """The content of its state.json when it was first needed; {} if that cannot be read."""
        return self._state[0]

    @property
    def run(self) -> RunDirectory | None:
        """The run; None if it cannot be opened."""
        return self._run[0]

    @property
    def problem(self) -> str:
        """The reason in a line; "" if it can be opened."""
        return self._run[1]

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
        """Time of creation; if its state has none, of the last change of its folder."""
        return int(self.state.get("created_ns") or self.path.stat().st_mtime_ns)


@dataclass(frozen=True)
class Target:
    """The runs that a path or name refers to.

    Attributes:
        runs: oldest first; at least one.
        experiment: the folder of the experiment if that was requested, or None if it was one run.
    """

    runs: tuple[RunEntry, ...]
    experiment: Path | None = None

    def opened(self) -> list[RunDirectory]:
        """The runs.

        Raises:
            RecordError: some cannot be opened.
        """
        broken = [f"{_shown(entry.path.name)}: {entry.problem}" for entry in self.runs if entry.run is None]
        if broken:
            raise RecordError(
                "open runs",
                found="; ".join(broken),
                rule="whole records of this version's settings",
                fix="move these folders away, or name the runs that you mean",
            )
        return [entry.run for entry in self.runs if entry.run is not None]


def experiment_folder(path: Path) -> Path:
    """Folder of the runs and report of a file: that of ``ablation.yaml``, or one named after any other file."""
    path = path.resolve()
    return path.parent if path.stem == "ablation" else path.parent / path.stem


def experiments(project: Path | None = None) -> list[Path]:
    """The folders of experiments that have runs, by path.

    They are those under ``experiments`` of the project and, if none is given, also the current folder and those up to
    two levels below it, where `workbench run` puts the runs of a file that lies there.
    """
    found = ((project or project_root()) / "experiments").glob("*/runs")
    here = [] if project else [runs for depth in _HERE for runs in Path.cwd().glob(f"{depth}runs")]
    folders = dict.fromkeys([*found, *here])
    return sorted({runs.parent.resolve() for runs in folders if any(runs.glob("*/config.json"))})


def runs_of(experiment_dir: Path, *, every: bool = False) -> list[RunEntry]:
    """The runs of an experiment, oldest first.

    Args:
        experiment_dir: the parent of ``runs``.
        every: also attempts that a later one of the same name replaces. Otherwise the newest of each name, and those
            that the experiment's ``sweep.json`` names.
    """
    entries = sorted(
        (RunEntry(path.parent) for path in (experiment_dir / "runs").glob("*/config.json")),
        key=lambda entry: (entry.created_ns, entry.path.name),
    )
    if every:
        return entries
    newest = {entry.name: entry.path.name for entry in entries}
    shown = {*newest.values(), *_launched_folders(experiment_dir / "runs")}
    return [entry for entry in entries if entry.path.name in shown]


def look_up(query: str | Path, project: Path | None = None, *, every: bool = False) -> Target:
    """Return the run or the experiment that a path or name refers to.

    Args:
        query: the folder of a run or of an experiment, its ablation file, the name of an experiment, or the beginning
            of a run's name or folder, alone or as ``experiment/run``.
        project: the parent of ``experiments``; None takes `project_root` and the current folder, see `experiments`.
        every: of an experiment, older attempts too.

    Raises:
        RecordError: nothing of that name, nothing run yet, or several runs that match.
    """
    for place in _places(query, project):
        target = _at(place, every)
        if target is not None:
            return target
    return Target((_by_name(str(query), project),))


def compared_at(query: str | Path, project: Path | None = None) -> Path:
    """Return the folder of the saved comparison of an experiment, which `look_up` finds, or which has no runs left.

    Whether the comparison is there is left to its reader.

    Raises:
        RecordError: several experiments of that name, or one run.
    """
    if Path(query).is_dir():
        return Path(query)
    for place in _places(query, project):
        if (folder := _folder(place)).is_dir():
            return folder
    return Path(query) if Path(query).exists() else experiment_at(query, project)


def experiment_at(query: str | Path, project: Path | None = None) -> Path:
    """Return the folder of an experiment, by path or by name.

    Raises:
        RecordError: it has no runs.
    """
    target = look_up(query, project)
    if target.experiment is None:
        raise RecordError(
            f"look for the experiment {query}",
            found="a run",
            rule="the folder of an experiment",
            fix=f"give {_shown(target.runs[0].experiment_dir.name)}, or use `workbench status`",
        )
    return target.experiment


def shell_name(run: Path, project: Path | None = None) -> str:
    """Spell a run for a shell: ``experiment/folder`` where `look_up` finds that, and its path elsewhere."""
    run, here = run.resolve(), Path.cwd()
    if run.parents[2] == (project or project_root()).resolve() / "experiments":
        return shlex.quote(f"{run.parents[1].name}/{run.name}")
    return shlex.quote(str(run.relative_to(here) if run.is_relative_to(here) else run))


def _places(query: str | Path, project: Path | None) -> list[Path]:
    """Folders in which a path or name may be: here, in the project, and among the experiments that have runs.

    Raises:
        RecordError: several experiments elsewhere have that name.
    """
    root = project or project_root()
    near = [Path(query), root / "experiments" / query, root / query]
    named = [folder for folder in experiments(project) if folder.name == str(query)]
    if len(named) > 1 and not any(_folder(place).is_dir() for place in near):
        raise RecordError(
            f"look for {str(query)!r}",
            found=f"{len(named)} experiments: {', '.join(_shell_path(folder) for folder in named)}",
            rule="a name that matches one experiment",
            fix="give one of these folders",
        )
    return [*near, *named]


def _folder(place: Path) -> Path:
    """The folder of the experiment of a file, or the path itself."""
    return experiment_folder(place) if place.suffix in (".yaml", ".yml") and place.is_file() else place


def _shell_path(path: Path) -> str:
    """Spell a path for a shell in the current folder."""
    here, path = Path.cwd(), path.resolve()
    return shlex.quote(_shown(str(path.relative_to(here) if path.is_relative_to(here) else path)))


def _state_alone(path: Path) -> dict[str, Any]:
    """The state of a run whose settings cannot be read."""
    try:
        state = from_json((path / "state.json").read_bytes())
        check_types(path / "state.json", state, {"created_ns": STATE_TYPES["created_ns"]})
    except (OSError, ValueError, AttributeError, RecordError):
        return {}
    return dict(state)


def _launched_folders(runs_dir: Path) -> set[str]:
    """The folders named by the last launches, even if a later attempt has the same name."""
    try:
        record = from_json((runs_dir / "sweep.json").read_bytes())
        return {str(folder) for key in ("runs", "latest") for folder in record.get(key, {}).values()}
    except (OSError, ValueError, AttributeError):
        return set()


def _at(place: Path, every: bool) -> Target | None:
    """The run or experiment at a path; None if there is neither."""
    given, place = place, _folder(place)
    if (place / "config.json").is_file() and (place / "state.json").is_file():
        return Target((RunEntry(place.resolve()),))
    if place.name == "runs" and any(place.glob("*/config.json")):
        place = place.parent
    files = [file for file in (given, place / "ablation.yaml", place.parent / f"{place.name}.yaml") if file.is_file()]
    if not given.is_file() and not (place.is_dir() and (files or (place / "runs").is_dir())):
        return None
    place = place.resolve()
    runs = runs_of(place, every=every)
    if not runs:
        raise RecordError(
            f"look for the runs of {_shown(place.name)}",
            found="none yet",
            rule="its folder `runs` has a folder for each run",
            fix=f"start them: workbench run {_shell_path(files[0]) if files else 'FILE.yaml'}",
        )
    return Target(tuple(runs), place)


def _by_name(query: str, project: Path | None) -> RunEntry:
    """The newest attempt of the only run whose name begins with the query."""
    every = [entry for folder in experiments(project) for entry in runs_of(folder, every=True)]
    exact = [entry for entry in every if query in _spellings(entry, entry.path.name)]
    named = [entry for entry in every if query in _spellings(entry, entry.name)]
    begun = [
        entry
        for entry in every
        if any(name.startswith(query) for name in _spellings(entry, entry.path.name, entry.name))
    ]
    matches = exact or named or begun
    newest = {(entry.experiment_dir, entry.name): entry for entry in matches}  # later attempts replace earlier ones
    if len(newest) == 1:
        return next(iter(newest.values()))
    if not newest:
        known = {entry.name for entry in every} | {folder.name for folder in experiments(project)}
        raise RecordError(
            f"look for {query!r}",
            found="no run or experiment of that name",
            rule="a folder, an experiment's name, or the beginning of a run's name",
            fix=did_you_mean(query, known, most=3, show=_shown, otherwise="`workbench ls` shows what is there"),
        )
    raise RecordError(
        f"look for {query!r}",
        found=f"{len(newest)} runs: {_listed(newest.values())}",
        rule="a name that matches one run",
        fix="give more of the name, or experiment/run",
    )


def _spellings(entry: RunEntry, *names: str) -> list[str]:
    return [*names, *(f"{entry.experiment_dir.name}/{name}" for name in names)]


def _listed(entries: Iterable[RunEntry]) -> str:
    names = [_shown(f"{entry.experiment_dir.name}/{entry.path.name}") for entry in entries]
    more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])


def _shown(name: str) -> str:
    """A printable form of a name from the disk, which may contain anything."""
    return name if name.isprintable() else repr(name)
