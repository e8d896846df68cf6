"""Send runs to a tracker while they continue, from a process beside the launcher; never from a rank.

The process reads the records that the ranks write anyway. Its failure is reported, and harms no run. It ends when all
its runs have ended, or when the launcher does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from workbench.atomic import to_json
from workbench.records.directory import RunDirectory
from workbench.records.provenance import python_path
from workbench.report.exporters.export import TrackerName, check_tracker, default_folder, environment

_ONLINE = {"wandb": ("WANDB_MODE", "online"), "mlflow": ("MLFLOW_TRACKING_URI", "")}
"""Variable of a tracker's own, and the value, "" for any, by which its user asks for a server."""
_CLOSING_S = 60.0


class Follower:
    """The process that follows runs.

    Attributes:
        folder: has the tracker's files, and ``follow.log``, what the tracker said.
        failure: why it stopped before its runs did; "" if it did not.
    """

    def __init__(self, runs: Sequence[RunDirectory], to: TrackerName, project: str, folder: Path) -> None:
        self.to, self.folder, self.failure = to, folder, ""
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "follow.log"
        command = [sys.executable, "-P", "-m", "workbench.report.exporters.live"]
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(to, folder),
                start_new_session=True,  # an interrupt of the launcher must not cut the end of the record
            )
        paths = [str(run.path) for run in runs]
        request = {"tracker": to, "project": project, "folder": str(folder), "runs": paths}
        assert self._child.stdin is not None
        self._child.stdin.write(to_json(request, indent=None))
        self._child.stdin.flush()  # and stays open: its end tells the child that the launcher has ended
        self._watcher = threading.Thread(target=self._watch, name="tracker", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        if code := self._child.wait():
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            self.failure = lines[-1] if lines else f"exit code {code}"
            _say(self.to, self.failure)

    def close(self) -> str:
        """Let the tracker write what is recorded, wait for its end, and return `failure`."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:  # a server that does not answer
            self._child.kill()
        self._watcher.join()
        return self.failure


class Tracking:
    """A checked request to follow runs, for `workbench.launch.run.launch`: call it with the runs; that never raises.

    Files go to ``exports/<tracker>-live`` next to the first run, unless a folder is given. Nothing is sent from this
    machine, unless the tracker's own settings request it: ``WANDB_MODE=online``, or any ``MLFLOW_TRACKING_URI``.

    Args:
        to: the tracker; None follows nothing.
        project: the tracker's project, above the experiment.
        folder: gets the tracker's files.

    Raises:
        LaunchError: the tracker's package is not installed.
        SpecError: no such tracker, or a project name that cannot be used everywhere.
    """

    def __init__(self, to: TrackerName | None, *, project: str = "workbench", folder: Path | None = None) -> None:
        self.to, self.project, self.folder = to, project, folder
        self.follower: Follower | None = None
        if to is not None:
            check_tracker(to, project)

    def __call__(self, runs: Sequence[RunDirectory]) -> None:
        """Start to follow runs."""
        if self.to is None or not runs:
            return
        folder = self.folder or default_folder(runs[0], f"{self.to}-live")
        try:
            self.follower = Follower(runs, self.to, self.project, folder.absolute())
        except OSError as error:
            _say(self.to, str(error))

    def close(self) -> str:
        """Let the tracker write what is recorded, wait for its end, and return why it stopped early, "" if not."""
        return self.follower.close() if self.follower is not None else ""


def is_online(to: str) -> bool:
    """True if the tracker's own environment variables request its server."""
    name, value = _ONLINE.get(to, ("", ""))
    return bool(name) and bool(os.environ.get(name)) and value in ("", os.environ[name])


def _environment(to: str, folder: Path) -> dict[str, str]:
    ours = {"PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if is_online(to):
        return dict(os.environ) | ours
    return environment(folder, folder / ".scratch") | ours


def _say(to: str, why: str) -> None:
    sys.stderr.write(f"tracking with {to} stopped: {why}. The runs continue; workbench export adds them later.\n")
