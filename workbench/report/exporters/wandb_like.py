"""Trackers with the API of W&B: begin a run with its config, log values by step, finish.

W&B itself stores each offline run in a file, which `wandb sync` uploads. It writes through a service process, which
ends with `close`.

trackio has the same three calls, but its `log` stamps rows with the time of the call, names runs at random, and
turns errors into warnings. So its session here takes the same calls and writes the rows as trackio's own importers do,
in one transaction: with their times, under our name, atomically.
"""

from __future__ import annotations

import datetime
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from workbench.report.exporters.tracked import TrackedRun, TrackedStep, Writer

_TIME = "_timestamp"


class _WandbLike(Writer):
    """Common base of both; each has ``begin``, which returns a session with ``log`` and ``finish``."""

    lost: tuple[str, ...] = ()
    """Facts that the tracker cannot store, a sentence each."""

    def begin(self, run: TrackedRun, config: dict[str, Any], *, live: bool = False) -> Any:
        """Return a session of the tracker; a live one is visible at once."""
        raise NotImplementedError

    def keep(self, run: TrackedRun) -> None:
        """Complete a run; called when it is written."""

    def write(self, run: TrackedRun) -> list[str]:
        """Write a run, and return what could not be stored as it is."""
        notes: list[str] = []
        session = self.begin(run, run.config | run.facts)
        for step in run.steps:
            session.log(self.renamed(step.values, notes) | {_TIME: step.time_s}, step=step.number)
        session.finish(exit_code=0 if run.state == "succeeded" else 1)
        self.keep(run)
        return list(dict.fromkeys([*notes, *self.lost]))

    def live(self, run: TrackedRun) -> _LiveSession:
        """Begin a run that continues."""
        return _LiveSession(self, self.begin(run, run.config | run.facts, live=True))

    def renamed(self, values: dict[str, float], notes: list[str]) -> dict[str, float]:
        """Rename keys that the tracker reserves."""
        names = {key: f"metric/{key}" for key in values if self.is_reserved(key)}
        notes += [f"metric {key} is called {name} there" for key, name in names.items()]
        return {names.get(key, key): value for key, value in values.items()}

    def is_reserved(self, key: str) -> bool:
        """True if the tracker reserves a key."""
        return key.startswith("_")


class _LiveSession:
    """A session that is handed a step at a time."""

    def __init__(self, writer: _WandbLike, session: Any) -> None:
        self.writer, self.session = writer, session

    def log_step(self, step: TrackedStep) -> None:
        """Write a step."""
        self.session.log(self.writer.renamed(step.values, []) | {_TIME: step.time_s}, step=step.number)

    def end(self, run: TrackedRun) -> None:
        """Say how it ended."""
        self.session.finish(exit_code=0 if run.state == "succeeded" else 1)


class Wandb(_WandbLike):
    """W&B's offline runs: folder/wandb/offline-run-<time>-<id>."""

    lost = ("W&B counts relative times from the export; a step's wall time is its own, and run.began is in the config",)

    def __init__(self, folder: Path, project: str) -> None:
        super().__init__(folder, project)
        self._scratch: Path | None = None
        self._began = False

    def has(self, run: TrackedRun) -> bool:
        """True if a folder of that run exists; it gets its name when it is complete."""
        return any((self.folder / "wandb").glob(f"offline-run-*-{run.key}/run-{run.key}.wandb"))

    def begin(self, run: TrackedRun, config: dict[str, Any], *, live: bool = False) -> Any:
        """Begin a run: a live one as WANDB_MODE says, any other offline and in a folder of its own."""
        import wandb

        if live:
            place, mode = self.folder, os.environ.get("WANDB_MODE", "offline")
        else:
            place, mode = Path(tempfile.mkdtemp(prefix=f".unfinished-{os.getpid()}-", dir=self.folder)), "offline"
            self._scratch = place
        settings = {
            "mode": mode,
            "root_dir": str(place),
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
        known = {key: value for key, value in settings.items() if key in wandb.Settings.model_fields}
        self._began = True
        return wandb.init(
            project=self.project,
            id=run.key,
            name=run.name,
            group=run.experiment,
            config=config,
            tags=run.tags,
            notes=str(run.facts.get("run.failure", "")),
            settings=wandb.Settings(**known),
            reinit="create_new" if live else None,  # live runs continue side by side
        )

    def keep(self, run: TrackedRun) -> None:
        """Move the finished run to its place."""
        assert self._scratch is not None, "keep comes after begin"
        [written] = (self._scratch / "wandb").glob(f"offline-run-*-{run.key}")
        for link in (written / "logs").glob("*"):
            if link.is_symlink():  # into a cache that is removed with this process
                link.unlink()
        (self.folder / "wandb").mkdir(exist_ok=True)
        written.rename(self.folder / "wandb" / written.name)
        shutil.rmtree(self._scratch)
        self._scratch = None

    def close(self) -> None:
        """End W&B's service, if a run began here, and remove what an error left unfinished."""
        if self._began:
            import wandb

            wandb.teardown()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


class Trackio(_WandbLike):
    """trackio's database of the project, in the folder that TRACKIO_DIR names when trackio is imported."""

    def has(self, run: TrackedRun) -> bool:
        """True if the database has the run."""
        from trackio.sqlite_storage import SQLiteStorage

        return any(record["id"] == run.key for record in SQLiteStorage.get_run_records(self.project))

    def begin(self, run: TrackedRun, config: dict[str, Any], *, live: bool = False) -> Any:
        """Begin to collect a run; rows of a live one are written as they come."""
        own = {"_Group": run.experiment, "_Created": _iso(run.began_s), "_Username": None}
        session = _TrackioLive if live else _TrackioSession
        return session(self.project, run, config | {"run.tags": run.tags} | own)

    def is_reserved(self, key: str) -> bool:
        """True if trackio reserves a key."""
        from trackio.utils import RESERVED_KEYS

        return key.startswith("_") or key in RESERVED_KEYS


class _TrackioSession:
    """A run whose rows are collected, and written when it is finished."""

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


class _TrackioLive(_TrackioSession):
    """A run whose rows are written one by one."""

    def __init__(self, project: str, run: TrackedRun, config: dict[str, Any]) -> None:
        super().__init__(project, run, config)
        self.any = False

    def log(self, data: dict[str, Any], step: int) -> None:
        """Write a row."""
        super().log(data, step)
        super().finish(exit_code=0)
        self.rows, self.any = [], True

    def finish(self, exit_code: int) -> None:
        """Write the row of a run without steps."""
        if not self.any:
            super().finish(exit_code)


def _iso(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat()
