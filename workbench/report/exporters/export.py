"""Export ended runs to a tracker, and return the outcome of each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from workbench.atomic import from_json, to_json
from workbench.errors import LaunchError, RecordError, SpecError
from workbench.records.directory import RUN_NAME, RunDirectory
from workbench.records.provenance import python_path
from workbench.records.states import ENDED
from workbench.report.exporters import TRACKERS
from workbench.report.exporters.tracked import tracked

TrackerName = Literal["wandb", "trackio", "mlflow", "tensorboard"]

_SETTINGS_OF_TRACKERS = ("WANDB_", "TRACKIO_", "MLFLOW_")
_OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
_PATIENCE_S, _PATIENCE_PER_RUN_S = 120.0, 20.0


@dataclass(frozen=True)
class Exported:
    """Outcome of the export of a run.

    Attributes:
        id: name of its folder, which is its name at the tracker.
        outcome: "exported"; "there already", and left alone; or "left out".
        steps: number of steps written.
        why: why it was left out, "" otherwise.
        notes: what the tracker could not store as it is, a sentence each.
    """

    id: str
    outcome: str
    steps: int = 0
    why: str = ""
    notes: tuple[str, ...] = ()


def export_runs(
    runs: Sequence[RunDirectory], *, to: TrackerName, project: str = "workbench", folder: Path | str | None = None
) -> list[Exported]:
    """Export each run to a tracker, in files on this machine; nothing is sent anywhere.

    Settings become its config, step records its metrics with their step numbers and times, the experiment its group.
    Only runs that have ended are exported, so that exported runs never change: exporting again adds what is new and
    leaves the rest alone. Each run is written atomically.

    Args:
        runs: runs of one or several experiments.
        to: the tracker.
        project: the tracker's project, above the experiment.
        folder: gets the tracker's files; None takes ``exports/<tracker>`` next to the first run.

    Returns:
        The outcome of each run, in the same order.

    Raises:
        LaunchError: the tracker's package is not installed, or it failed.
        SpecError: no such tracker, or a project name that cannot be used everywhere.

    Example:
        >>> export_runs(RunDirectory.find(folder / "runs", "cp2"), to="tensorboard")   # doctest: +SKIP
        [Exported(id='cp2-0a1b2c3d', outcome='exported', steps=4, why='', notes=())]
    """
    check_tracker(to, project)
    if not runs:
        return []
    folder = default_folder(runs[0], to) if folder is None else Path(folder).absolute()
    outcomes: dict[Path, Exported] = {}
    ready = []
    for run in runs:
        if run.status not in ENDED:
            outcomes[run.path] = Exported(run.path.name, "left out", why=f"it is {run.status}")
            continue
        try:
            ready.append((run.path, tracked(run)))
        except RecordError as error:
            outcomes[run.path] = Exported(run.path.name, "left out", why=error.parts["found"])
    if ready:
        request = {"tracker": to, "project": project, "folder": str(folder), "runs": [asdict(run) for _, run in ready]}
        for (path, exported), answer in zip(ready, _export(request, to), strict=True):
            outcomes[path] = Exported(exported.id, answer["outcome"], answer["steps"], "", tuple(answer["notes"]))
    return [outcomes[run.path] for run in runs]


def check_tracker(to: str, project: str) -> None:
    """Refuse an unknown tracker, a project name that cannot be used everywhere, and a package that is missing.

    Raises:
        LaunchError, SpecError: as `export_runs`.
    """
    tracker = TRACKERS.get(to)
    if tracker is None:
        raise SpecError(
            f"export to {to!r}", found=repr(to), rule=f"one of {', '.join(TRACKERS)}", fix="use one of them"
        )
    if not RUN_NAME.fullmatch(project):
        raise SpecError(
            f"export to the project {project!r}",
            found=repr(project),
            fix="choose another name",
            rule="letters, digits, '.', '_' and '-', beginning with a letter or digit",
        )
    if not _is_installed(tracker.package):
        raise LaunchError(
            f"export to {to}",
            found=f"the package {tracker.package} is not installed",
            rule="trackers are extras",
            fix=f"pip install 'workbench[{to}]'",
        )


def default_folder(run: RunDirectory, to: str) -> Path:
    """Return the default folder of a tracker's files: next to the runs, which are not under version control."""
    return run.path.parent.absolute() / "exports" / to


def _is_installed(package: str) -> bool:
    """True if the package can be imported; a folder of that name, as W&B leaves behind, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _export(request: dict[str, Any], to: str) -> list[dict[str, Any]]:
    """Export in a separate process, and return the outcome of each run."""
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="export-") as scratch:
        answers = Path(scratch) / "answers"
        command = [sys.executable, "-P", "-m", "workbench.report.exporters", str(answers)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(folder, Path(scratch)),
            start_new_session=True,
        )
        try:
            patience = _PATIENCE_S + _PATIENCE_PER_RUN_S * len(request["runs"])
            output = child.communicate(to_json(request, indent=None), timeout=patience)[0]
        except BaseException as error:
            # the child leads its own group and is not reaped yet, so no other group can have its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            for unfinished in folder.rglob(f".unfinished-{child.pid}-*"):
                shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, subprocess.TimeoutExpired):
                raise LaunchError(
                    f"export to {to}",
                    found=f"no end after {patience:.0f} s",
                    rule="an export writes files of this machine",
                    fix="see whether the folder's disk is slow or full; what was written is whole, and exporting "
                    "again continues",
                ) from None
            raise
        outcomes = [from_json(line) for line in answers.read_bytes().splitlines()] if answers.exists() else []
    if child.returncode:
        lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
        failure = LaunchError(
            f"export to {to}",
            found=lines[-1] if lines else f"exit code {child.returncode}",
            rule="the tracker takes the run",
            fix=f"{len(outcomes)} runs are there; fix the error above and export again",
        )
        failure.add_note("\n".join(lines[-30:]))
        raise failure
    return outcomes


def environment(folder: Path, scratch: Path) -> dict[str, str]:
    """Return this process's environment without the user's settings for trackers, which name accounts and servers."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_SETTINGS_OF_TRACKERS)}
    scratches = dict.fromkeys(("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"), str(scratch))
    ours = {"TRACKIO_DIR": str(folder), "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1"}  # errors come last
    return inherited | _OFFLINE | scratches | ours
