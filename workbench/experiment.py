"""The public API of an ablation: one object from a question to verdicts and a report.

experiment = wb.Experiment("experiments/layout_parity/ablation.yaml")
experiment.launch(where="processes")    # returns at once
experiment.panel()                      # live rows in a notebook
comparison = experiment.compare()       # waits for the runs, and saves the verdicts
experiment.report()                     # one HTML page
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workbench.atomic import write_whole
from workbench.columns import columns
from workbench.errors import RecordError, SpecError
from workbench.launch.ablation import AblationSpec, PlannedRun, ablation_file, load_ablation, lookup, select
from workbench.launch.run import Where, launch, requests
from workbench.launch.sweep import Sweep, refuse_unknown
from workbench.launch.task import RunEvent
from workbench.records.directory import ENDED, RunDirectory
from workbench.records.lookup import experiment_folder
from workbench.records.provenance import project_root, provenance
from workbench.specs.reading import merge, read_yaml

if TYPE_CHECKING:
    from workbench.compare.comparison import Comparison
    from workbench.launch.status import RunStatus
    from workbench.report.exporters.export import Exported, TrackerName
    from workbench.report.panel import Panel

_POLL_S = 0.2


class Experiment:
    """An ablation with its runs, verdicts and report.

    All of it is on disk: the same file gives the same experiment in another process or after a restart of the kernel.
    `only` and `changes` make a part or a variation, whose comparison and report are saved under the folder ``runs``, so
    that neither replaces those of the whole.

    Args:
        ablation: a YAML file with an ablation or with one run's spec, a folder that holds ``ablation.yaml``, or the
            settings themselves.
        folder: for settings, the folder of the experiment, which gets ``ablation.yaml``; None takes a new temporary
            one.
        only: names of configurations or runs; the runs that they need are added.
        changes: settings merged over the ablation's base.
        project: the folder that paths in specs are relative to; None takes `project_root`.

    Attributes:
        spec: the ablation, with the changes.
        path: its file.
        folder: the folder of the experiment; its runs are in ``runs``.
        planned: the chosen runs.
        sweep: the runs that this object has launched; None before `launch`.

    Raises:
        SpecError: invalid settings, an unknown name, a change of a setting that is an axis, or a folder that holds
            another ablation.

    Example:
        >>> two = {"reference": "a", "configurations": {"a": {}, "b": {"layout": {"cp": 2}}}}
        >>> experiment = Experiment({"base": {"precision": "float64"}, **two})
        >>> experiment.states()
        {'a': 'not launched', 'b': 'not launched'}
    """

    def __init__(
        self,
        ablation: Path | str | Mapping[str, Any],
        *,
        folder: Path | str | None = None,
        only: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
        project: Path | None = None,
    ) -> None:
        self.project = (project or project_root()).resolve()
        self.path = _ablation_file(ablation, folder)
        whole = load_ablation(self.path)
        self.spec = _changed(whole, changes or {}, where=str(self.path))
        self.folder = experiment_folder(self.path)
        original = whole.expand()
        planned = self.spec.expand(where=str(self.path))
        self.planned: list[PlannedRun] = select(planned, only) if only else planned
        specs = {plan.name: plan.spec for plan in original}
        self._trial = any(specs.get(plan.name) != plan.spec for plan in self.planned)
        self._whole = self.planned == original
        self.sweep: Sweep | None = None
        self._comparison: Comparison | None = None

    # ---- runs ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the experiment, that of its folder."""
        return self.folder.name

    @property
    def runs(self) -> list[RunDirectory]:
        """The runs that were launched here, or else those on disk: of each planned run the newest with its settings."""
        if self.sweep is not None:
            return list(self.sweep.runs)
        return [run for run in map(self._newest, self.planned) if run is not None]

    def states(self) -> dict[str, str]:
        """The state of every planned run, by name, such as "running" or "succeeded"; "not launched" without a run."""
        if self.sweep is not None:
            return self.sweep.states()
        return {plan.name: "not launched" for plan in self.planned} | {run.name: run.status for run in self.runs}

    def status(self) -> list[RunStatus]:
        """Everything about every run: progress, ranks, who is waited for, and why it failed.

        Example:
            >>> pandas.DataFrame(experiment.status())   # doctest: +SKIP
        """
        from workbench.launch.status import status_of

        return [status_of(run) for run in self.runs]

    def _newest(self, plan: PlannedRun) -> RunDirectory | None:
        runs = RunDirectory.find(self.folder / "runs", plan.name)
        return next((run for run in reversed(runs) if run.spec == plan.spec), None)

    # ---- execution -----------------------------------------------------------------------------------

    def launch(
        self,
        where: Where = "torchx",
        *,
        fresh: bool = False,
        force: bool = False,
        options: Mapping[str, str] | None = None,
        per_job: int | None = None,
    ) -> Experiment:
        """Start the missing runs and return this experiment at once.

        A run that succeeded with the same settings, rollout dataset, checkpoint and code is reused, and one with a
        checkpoint is resumed.

        Args:
            where: what launches the ranks: "torchx", "processes", "here" (in this process; returns when the last run
                has ended), "slurm" or "kubernetes"; see `workbench.launch.run.Where`.
            fresh: run everything again.
            force: run changed configurations again, instead of raising an error.
            options: options of the cluster's scheduler.
            per_job: runs of one world size that share a job, one after another; None: the launcher chooses.

        Raises:
            SpecError, LaunchError: see `workbench.launch.run.launch`; then nothing was started.
        """
        self._comparison = None
        self.sweep = launch(
            self.planned,
            self.folder,
            where=where,
            project=self.project,
            fresh=fresh,
            force=force,
            trial=self._trial,
            options=options,
            per_job=per_job,
        )
        return self

    def requests(
        self, where: Where, *, options: Mapping[str, str] | None = None, per_job: int | None = None
    ) -> dict[str, str]:
        """Return the exact scheduler request of every job, by the names of its runs. Nothing is written or contacted.

        Raises:
            LaunchError: a run cannot be placed, or an option that the scheduler does not know.
        """
        return requests(self.planned, self.folder, where=where, project=self.project, options=options, per_job=per_job)

    def wait(self) -> dict[str, str]:
        """Wait until every run has ended, and return the `states`. An interrupt (Ctrl-C) leaves the runs running."""
        if self.sweep is not None:
            return self.sweep.wait().states()
        while any(run.status not in ENDED for run in self.runs):
            time.sleep(_POLL_S)
        return self.states()

    def cancel(self, *names: str) -> None:
        """Cancel runs, all that have not ended if none is named; also runs that another process launched.

        Raises:
            LaunchError: a name without a run; then nothing is cancelled.
        """
        if self.sweep is not None and not self.sweep.done:
            self.sweep.cancel(*names)
            return
        from workbench.launch.cancel import cancel_runs

        runs = {run.name: run for run in self.runs}
        refuse_unknown(names, runs, of="experiment")
        cancel_runs([run for name, run in runs.items() if name in (names or runs)], by=f"experiment {self.name}")

    # ---- results -------------------------------------------------------------------------------------

    @property
    def results(self) -> Path:
        """The folder of ``comparison.json`` and ``report.html``."""
        return self.folder if self._whole else self.folder / "runs"

    def panel(self) -> Panel:
        """Return live rows of the runs for a notebook: progress, curves, logs, and a button that cancels."""
        from workbench.report.panel import attach

        return attach(self.sweep if self.sweep is not None else self.folder if self._whole else self.runs)

    def compare(self) -> Comparison:
        """Wait for the runs, compare each with its baseline, and save the comparison.

        Without any run on disk the saved comparison is read.

        Raises:
            RecordError: some runs are missing, or there are no runs and no saved comparison.
        """
        if self._comparison is not None:
            return self._comparison
        from workbench.compare.align import Subject, compare_runs
        from workbench.compare.comparison import Comparison

        self.wait()
        runs = self.runs
        if missing := [name for name, state in self.states().items() if state == "not launched"]:
            if not runs:
                return Comparison.load(self.results / "comparison.json")
            raise RecordError(
                f"compare the runs of {self.name}",
                found=f"no run of {', '.join(missing)} with these settings",
                rule="every planned run has a run directory",
                fix="launch() runs what is missing",
            )
        subjects = [
            Subject(plan.name, run, plan.reference, plan.truth) for plan, run in zip(self.planned, runs, strict=True)
        ]
        self._comparison = compare_runs(
            subjects, question=self.spec.question, experiment=self.name, provenance=provenance(self.project)
        )
        self._comparison.save(self.results / "comparison.json")
        return self._comparison

    def report(self, *, notebook: bool = False) -> Path:
        """Compare, write the report page, and return its path.

        Args:
            notebook: also execute the report as a notebook, ``report.ipynb`` next to the page.

        Raises:
            RecordError: as `compare`.
        """
        return _write_report(self.compare(), self.results, notebook=notebook)

    def run(
        self, *, notebook: bool = False, on_event: Callable[[RunEvent], None] | None = None, **launching: Any
    ) -> Comparison:
        """Launch, wait, compare and report in one call; an interrupt (Ctrl-C) cancels what runs.

        Args:
            notebook: see `report`.
            on_event: called with every step and end of a run, on this thread.
            launching: arguments of `launch`.

        Example:
            >>> Experiment("experiments/layout_parity/ablation.yaml").run(on_event=print).check()   # doctest: +SKIP
        """
        sweep = self.launch(**launching).sweep
        assert sweep is not None, "launched just now"
        try:
            sweep.follow(on_event or (lambda event: None))
            self.report(notebook=notebook)
        except KeyboardInterrupt:
            sweep.cancel()
            sweep.wait()
            raise
        return self.compare()

    def export(self, to: TrackerName, *, project: str = "workbench", folder: Path | None = None) -> list[Exported]:
        """Export the runs that have ended to a tracker, in files on this machine; nothing is sent anywhere.

        Args:
            to: "wandb", "trackio", "mlflow" or "tensorboard".
            project: the tracker's project, above the experiment.
            folder: gets the tracker's files; None takes ``runs/exports/<tracker>`` of the experiment.

        Raises:
            LaunchError: the tracker's package is not installed, or it failed.
            SpecError: a project name that cannot be used everywhere.
        """
        from workbench.report.exporters.export import export_runs

        return export_runs(self.runs, to=to, project=project, folder=folder)

    def _repr_html_(self) -> str:
        """The rows of the runs that were launched here, or else the settings of the planned ones."""
        from workbench.report.rich import as_html

        return as_html(self.spec if self.sweep is None else self.sweep)

    def __repr__(self) -> str:
        """The question, and the state of every run in a line."""
        lines = columns([("", name, state) for name, state in self.states().items()])
        head = f"Experiment {self.name}, {len(self.planned)} runs in {self.folder}"
        return "\n".join([head, *([f"  {self.spec.question}"] if self.spec.question else []), *lines])


def rebuild_report(folder: Path, *, notebook: bool = False) -> Path:
    """Write the page of `Experiment.report` again, from the comparison.json of a folder, and return its path.

    Raises:
        RecordError: there is no comparison, or it is damaged.
    """
    from workbench.compare.comparison import Comparison

    return _write_report(Comparison.load(folder), folder, notebook=notebook)


def _write_report(comparison: Comparison, folder: Path, *, notebook: bool) -> Path:
    """Write the page, and execute the notebook meanwhile: its kernel is a process of its own."""

    def write_page() -> Path:
        from workbench.report.page import write_report

        return write_report(comparison, folder / "report.html")

    if not notebook:
        return write_page()
    from workbench.report.notebook import write_notebook

    with ThreadPoolExecutor(max_workers=1) as thread:
        page = thread.submit(write_page)
        try:
            write_notebook(folder / "comparison.json")
        finally:
            page.result()  # the page is written also if the notebook fails, and an error of the page comes first
    return page.result()


def _ablation_file(ablation: Path | str | Mapping[str, Any], folder: Path | str | None) -> Path:
    """Return the file of an ablation; settings are written to ``ablation.yaml`` of their folder."""
    if not isinstance(ablation, Mapping):
        if folder is not None:
            raise SpecError(
                f"experiment {ablation} in {folder}",
                found="a file and a folder",
                rule="a file's experiment lies next to the file",
                fix="leave folder out, or pass the settings",
            )
        return ablation_file(ablation)
    load_ablation(ablation)  # before anything is written
    try:
        text = yaml.safe_dump(dict(ablation), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise SpecError(
            "experiment from settings",
            found=f"{error}".partition("\n")[0],
            rule="settings are text, numbers, booleans, lists and mappings, as in YAML",
            fix="convert the value",
        ) from None
    path = Path(tempfile.mkdtemp(prefix="workbench-") if folder is None else folder) / "ablation.yaml"
    if path.is_file() and read_yaml(path) != yaml.safe_load(text):
        raise SpecError(
            f"experiment in {path.parent}",
            found="an ablation.yaml with other settings",
            rule="a folder has one ablation",
            fix="use another folder, or Experiment(folder, changes=...)",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, text.encode())


def _changed(ablation: AblationSpec, changes: Mapping[str, Any], *, where: str) -> AblationSpec:
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
