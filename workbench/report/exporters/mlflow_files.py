"""MLflow's file store: folder/mlruns, one file a metric, in which nan and inf stay what they are.

MLflow 3 keeps this store in maintenance mode, and reads it where MLFLOW_ALLOW_FILE_STORE says true; `mlflow
migrate-filestore` makes a database of it. Its databases need packages that mlflow-skinny does not install, and cannot
store an infinity.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from workbench.report.exporters.tracked import TrackedRun, TrackedStep, Writer, as_text

ID = "workbench.run"
"""Tag that identifies a run."""

_ENDS = {"succeeded": "FINISHED", "cancelled": "KILLED"}
_ILLEGAL = re.compile(r"[^\w.\- :/]")
_KEY_LETTERS, _TEXT_LETTERS = 250, 5000
_METRICS_AT_ONCE, _PARAMS_AT_ONCE = 1000, 100


class Mlflow(Writer):
    """Runs in an experiment called project/experiment."""

    def __init__(self, folder: Path, project: str) -> None:
        super().__init__(folder, project)
        self.client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())

    def has(self, run: TrackedRun) -> bool:
        """True if the whole run is there; what an interrupted export left of it is removed."""
        experiment = self.client.get_experiment_by_name(self._experiment(run))
        if experiment is None:
            return False
        matches = self.client.search_runs([experiment.experiment_id], filter_string=f"tags.`{ID}` = '{run.id}'")
        for match in matches:
            if not match.info.end_time:
                self.client.delete_run(match.info.run_id)
        return any(match.info.end_time for match in matches)

    def write(self, run: TrackedRun) -> list[str]:
        """Write a run, and return what could not be stored as it is. The end time, written last, marks it complete."""
        notes: list[str] = []
        session = self._begin(run, notes)
        session.log(run.steps, {key for step in run.steps for key in step.values})
        session.end(run)
        return notes

    def live(self, run: TrackedRun) -> _Session:
        """Begin a run that continues, on the user's server if there is one."""
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):  # an export's environment has none
            self.client = MlflowClient(tracking_uri=uri)
        return self._begin(run, [])

    def _begin(self, run: TrackedRun, notes: list[str]) -> _Session:
        experiment = self.client.get_experiment_by_name(self._experiment(run))
        number = experiment.experiment_id if experiment else self.client.create_experiment(self._experiment(run))
        tags = {ID: run.id, "run.tags": " ".join(run.tags)} | {key: as_text(value) for key, value in run.facts.items()}
        created = self.client.create_run(
            number,
            start_time=_ms(run.began_s),
            run_name=run.name,
            tags={key: _cut(key, text, notes) for key, text in tags.items()},
        )
        params = (Param(key, _cut(key, as_text(value), notes)) for key, value in run.config.items())
        while batch := list(itertools.islice(params, _PARAMS_AT_ONCE)):
            self.client.log_batch(created.info.run_id, params=batch)
        return _Session(self.client, created.info.run_id, notes)

    def _experiment(self, run: TrackedRun) -> str:
        return f"{self.project}/{run.experiment}"


class _Session:
    """A run that takes metrics."""

    def __init__(self, client: MlflowClient, id: str, notes: list[str]) -> None:
        self.client, self.id, self.notes = client, id, notes

    def log(self, steps: Iterable[TrackedStep], keys: set[str]) -> None:
        """Write metrics of steps."""
        names = _names(keys, self.notes)
        metrics = (
            Metric(names[key], float(value), _ms(step.time_s), step.number)
            for step in steps
            for key, value in step.values.items()
            if key in names
        )
        while some := list(itertools.islice(metrics, _METRICS_AT_ONCE)):
            self.client.log_batch(self.id, metrics=some)

    def log_step(self, step: TrackedStep) -> None:
        """Write one step."""
        self.log([step], set(step.values))

    def end(self, run: TrackedRun) -> None:
        """Write how and when it ended."""
        self.client.set_terminated(self.id, _ENDS.get(run.state, "FAILED"), _ms(run.ended_s))


def _names(keys: set[str], notes: list[str]) -> dict[str, str]:
    """Return metric -> its name there: a path of legal characters that is no folder of another one."""
    folders = {str(parent) for key in keys for parent in Path(_legal(key)).parents}
    names: dict[str, str] = {}
    for key in sorted(keys, key=lambda key: (_legal(key) != key, key)):  # those that keep their names come first
        name = _legal(key) + (".value" if _legal(key) in folders else "")
        if not name or len(name) > _KEY_LETTERS or name in names.values():
            notes.append(f"metric {key} has no name that MLflow takes: left out")
            continue
        if name != key:
            notes.append(f"metric {key} is called {name} there")
        names[key] = name
    return names


def _legal(key: str) -> str:
    return "/".join(part for part in _ILLEGAL.sub("_", key).split("/") if part not in ("", ".", ".."))


def _cut(key: str, text: str, notes: list[str]) -> str:
    if len(text) > _TEXT_LETTERS:
        notes.append(f"{key} is cut to {_TEXT_LETTERS} letters")
    return text[:_TEXT_LETTERS]


def _ms(time_s: float) -> int:
    return round(time_s * 1000)
