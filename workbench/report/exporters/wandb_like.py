"""Trackers that speak as W&B does: begin a run with its config, log values by step, finish.

W&B itself keeps offline runs in a file each, which `wandb sync` uploads. It writes through a service process, which
ends with `close`.

trackio has the same three calls, but its `log` stamps rows with the moment of the call, names runs at random, and
turns errors into warnings. So its session here takes the same calls and hands the rows over as trackio's own importers
do, in one transaction: with their times, under our name, whole or not at all.
"""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

from workbench.report.exporters.tracked import TrackedRun

_TIME = "_timestamp"


class Session(Protocol):
    """A run that is being written."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Note the values of a step, and under ``_timestamp`` when it was."""

    def finish(self, exit_code: int) -> None:
        """End it."""


class _WandbLike:
    """What both have in common.

    Args:
        folder: gets the tracker's files.
        project: what runs are filed under.
    """

    lost: tuple[str, ...] = ()
    """What the tracker has no way to be told, a sentence each."""

    def __init__(self, folder: Path, project: str) -> None:
        self.folder, self.project = folder, project

    def has(self, run: TrackedRun) -> bool:
        """Whether the run is there, whole."""
        raise NotImplementedError

    def begin(self, run: TrackedRun, config: dict[str, Any]) -> Session:
        """Begin to write a run."""
        raise NotImplementedError

    def keep(self, run: TrackedRun) -> None:
        """Called when a run is written: make it whole."""

    def close(self) -> None:
        """Leave nothing running."""

    def write(self, run: TrackedRun) -> list[str]:
        """Write a run, and say what could not be taken as it is."""
        notes: list[str] = []
        session = self.begin(run, run.config | run.facts)
        for step in run.steps:
            session.log(self.renamed(step.values, notes) | {_TIME: step.time_s}, step=step.number)
        session.finish(exit_code=0 if run.state == "succeeded" else 1)
        self.keep(run)
        return list(dict.fromkeys([*notes, *self.lost]))

    def renamed(self, values: dict[str, float], notes: list[str]) -> dict[str, float]:
        """The values under keys that the tracker does not keep for itself."""
        names = {key: f"metric/{key}" for key in values if self.is_reserved(key)}
        notes += [f"metric {key} is called {name} there" for key, name in names.items()]
        return {names.get(key, key): value for key, value in values.items()}

    def is_reserved(self, key: str) -> bool:
        """Whether the tracker keeps a key for itself."""
        return key.startswith("_")


class Wandb(_WandbLike):
    """W&B's offline runs: folder/wandb/offline-run-<time>-<id>."""

    lost = ("W&B counts relative times from the export; a step's wall time is its own, and run.began is in the config",)

    def __init__(self, folder: Path, project: str) -> None:
        super().__init__(folder, project)
        self._scratch: Path | None = None

    def has(self, run: TrackedRun) -> bool:
        """Whether a folder of that run is there; it gets its name when it is whole."""
        return any((self.folder / "wandb").glob(f"offline-run-*-{run.key}/run-{run.key}.wandb"))

    def begin(self, run: TrackedRun, config: dict[str, Any]) -> Session:
        """Begin an offline run in a folder of its own."""
        import wandb

        self._scratch = Path(tempfile.mkdtemp(prefix=f".unfinished-{os.getpid()}-", dir=self.folder))
        wanted = {
            "mode": "offline",
            "root_dir": str(self._scratch),
            "silent": True,
            "console": "off",
            "host": "",
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "disable_job_creation": True,
            "x_disable_meta": True,
            "x_disable_stats": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
        }
        known = {key: value for key, value in wanted.items() if key in wandb.Settings.model_fields}
        return wandb.init(
            project=self.project,
            id=run.key,
            name=run.name,
            group=run.experiment,
            config=config,
            tags=run.tags,
            notes=str(run.facts.get("run.failure", "")),
            settings=wandb.Settings(**known),
        )

    def keep(self, run: TrackedRun) -> None:
        """Move the finished run to its place."""
        assert self._scratch is not None, "keep comes after begin"
        [written] = (self._scratch / "wandb").glob(f"offline-run-*-{run.key}")
        for link in (written / "logs").glob("*"):
            if link.is_symlink():  # into a cache that goes with this process
                link.unlink()
        (self.folder / "wandb").mkdir(exist_ok=True)
        written.rename(self.folder / "wandb" / written.name)
        shutil.rmtree(self._scratch)
        self._scratch = None

    def close(self) -> None:
        """End W&B's service, and remove what an error left unfinished."""
        import wandb

        wandb.teardown()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


class Trackio(_WandbLike):
    """trackio's database of the project, in the folder that TRACKIO_DIR names when trackio is imported."""

    def has(self, run: TrackedRun) -> bool:
        """Whether the database knows the run."""
        from trackio.sqlite_storage import SQLiteStorage

        return any(record["id"] == run.key for record in SQLiteStorage.get_run_records(self.project))

    def begin(self, run: TrackedRun, config: dict[str, Any]) -> Session:
        """Begin to collect a run."""
        own = {"_Group": run.experiment, "_Created": _iso(run.began_s), "_Username": None}
        return _TrackioSession(self.project, run, config | {"run.tags": run.tags} | own)

    def is_reserved(self, key: str) -> bool:
        """Whether trackio keeps a key for itself."""
        from trackio.utils import RESERVED_KEYS

        return key.startswith("_") or key in RESERVED_KEYS


class _TrackioSession:
    """A run that is collected, and written when it is finished."""

    def __init__(self, project: str, run: TrackedRun, config: dict[str, Any]) -> None:
        self.project, self.run, self.config = project, run, config
        self.rows: list[tuple[int, str, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int) -> None:
        """Collect a row."""
        self.rows.append((step, _iso(data[_TIME]), {key: value for key, value in data.items() if key != _TIME}))

    def finish(self, exit_code: int) -> None:
        """Write all rows and the config in one transaction; a run without steps gets an empty row, to be seen."""
        from trackio.sqlite_storage import SQLiteStorage

        rows = self.rows or [(0, _iso(self.run.began_s), {})]
        steps, times, values = (list(column) for column in zip(*rows, strict=True))
        SQLiteStorage.bulk_log(
            project=self.project,
            run=self.run.id,
            run_id=self.run.key,
            metrics_list=values,
            steps=steps,
            timestamps=times,
            config=self.config,
        )


def _iso(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat()
