"""The public API of an ablation: one object from a question to verdicts and a report.

experiment = wb.Experiment("experiments/layout_parity/ablation.yaml")
experiment.launch(where="processes")    # returns at once
experiment.panel()                      # live rows in a notebook
comparison = experiment.compare()       # waits for the runs, and saves the verdicts
experiment.report()                     # one HTML page
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.columns import columns
from workbench.errors import RecordError, SpecError
from workbench.launch import detached as detaching
from workbench.launch.ablation import PlannedRun, load_ablation, select
from workbench.launch.ablation_input import file_of, named_folder, with_changes
from workbench.launch.run import Where, launch, requests
from workbench.launch.sweep import Sweep, refuse_unknown
from workbench.launch.task import RunEvent
from workbench.records.directory import RunDirectory
from workbench.records.lookup import experiment_folder
from workbench.records.provenance import project_root, provenance
from workbench.records.states import CLUSTERS, ENDED
from workbench.report.exporters.follow import Tracking

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
            settings themselves. In settings ``loss: {"name": function}`` takes a function of this notebook or script;
            its source is saved in the folder.
        folder: for settings, the folder of the experiment, which gets ``ablation.yaml``; None takes a new temporary
            one, unless there is a name.
        name: for settings, the name of the experiment: its folder is ``experiments/<name>`` of the project.
        only: names of configurations or runs; the runs that they need are added.
        changes: settings merged over the ablation's base.
        project: the folder that paths in specs are relative to; None takes `project_root`.

    Attributes:
        spec: the ablation, with the changes.
        path: its file.
        folder: the folder of the experiment; its runs are in ``runs``.
        planned: the chosen runs.
        sweep: the runs that this object has launched itself; None before `launch`, and for a detached launcher.

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
        name: str | None = None,
        only: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
        project: Path | None = None,
    ) -> None:
        self.project = (project or project_root()).resolve()
        self.path = file_of(ablation, named_folder(name, folder, self.project), self.project)
        whole = load_ablation(self.path)
        self.spec = with_changes(whole, changes or {}, where=str(self.path))
        self.folder = experiment_folder(self.path)
        original = whole.expand()
        planned = self.spec.expand(where=str(self.path))
        self.planned: list[PlannedRun] = select(planned, only) if only else planned
        specs = {plan.name: plan.spec for plan in original}
        self._trial = any(specs.get(plan.name) != plan.spec for plan in self.planned)
        self._whole = self.planned == original
        self.sweep: Sweep | None = None
        self._only, self._changes = list(only), dict(changes or {})
        self._comparison: Comparison | None = None
        self.tracking = Tracking(None)

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
        from workbench.launch.status import statuses

        return statuses(self.runs)

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
        nodes: int = 1,
        track: TrackerName | None = None,
        detached: bool | None = None,
        report: bool = False,
        on_event: Callable[[RunEvent], None] | None = None,
    ) -> Experiment:
        """Start the missing runs and return this experiment at once.

        A run that succeeded with the same settings, rollout dataset, checkpoint and code is reused, and one with a
        checkpoint is resumed.

        Args:
            where: what launches the ranks: "torchx", "processes", "here" (in this process; returns when the last run
                has ended), "slurm", "sbatch" or "kubernetes"; see `workbench.launch.run.Where`.
            fresh: run everything again.
            force: run changed configurations again, instead of raising an error.
            options: options of the cluster's scheduler.
            per_job: runs of one world size that share a job, one after another; None: the launcher chooses.
            nodes: machines for each job, with equally many ranks on each.
            track: tracker that gets these runs while they continue; see `workbench.report.exporters.follow`.
            detached: launch from a process of its own, so that the runs continue after the end of this one: a kernel
                restart, a closed terminal. `panel`, `wait`, `cancel` and `compare` work as ever, from any process.
                False: they end with this process. None: detached if they are expected to take more than a few minutes
                (`workbench.launch.detached.LONG_S`) on this machine, which a line tells then.
            report: only detached: compare and write the report too, when the runs have ended.
            on_event: called with every step and end of a run, on the thread that watches them; not if detached.

        Raises:
            SpecError, LaunchError: see `workbench.launch.run.launch`; then nothing was started.
        """
        self._comparison = None
        if detached or (detached is None and self._takes_long(where)):
            launching = {"where": where, "fresh": fresh, "force": force, "options": options, "per_job": per_job}
            self._detach({**launching, "nodes": nodes, "track": track}, report, announce=detached is None)
            return self
        if report:
            raise SpecError(
                f"launch {self.name} with report=True",
                found="the runs are not detached",
                rule="only a detached launcher writes the report by itself",
                fix="launch(detached=True, report=True), or call report() afterwards",
            )
        self.tracking = Tracking(track)
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
            nodes=nodes,
            before=self.tracking,
            on_event=on_event,
        )
        return self

    def _takes_long(self, where: Where) -> bool:
        if where == "here" or where in CLUSTERS:  # a debugger; jobs that outlive their launcher anyway
            return False
        return detaching.expected_seconds(self.planned, self.folder / "runs", self.project) > detaching.LONG_S

    def _detach(self, launching: Mapping[str, Any], report: bool, *, announce: bool) -> None:
        """Have another process launch, and forget what was launched here: all that follows is read from disk."""
        if launching["where"] == "here":
            raise SpecError(
                f"launch {self.name} here, detached",
                found="'here' is this process",
                rule="a detached launcher is another process",
                fix="where='processes', or detached=False",
            )
        chosen = {"only": self._only, "changes": self._changes, "project": str(self.project)}
        request = {"ablation": str(self.path), **chosen, "launching": dict(launching), "report": report}
        launcher = detaching.start(request, self.folder / "runs")
        self.sweep = None
        if announce:
            sys.stderr.write(
                f"{self.name}: process {launcher.pid} continues these runs without this one (detached=False: they end "
                f"with it); workbench attach {self.name}, workbench cancel {self.name}\n"
            )

    def requests(
        self,
        where: Where,
        *,
        options: Mapping[str, str] | None = None,
        per_job: int | None = None,
        nodes: int = 1,
    ) -> dict[str, str]:
        """Return the exact scheduler request of every job, by the names of its runs. Nothing is written or contacted.

        Raises:
            LaunchError: a run cannot be placed, or an option that the scheduler does not know.
        """
        chosen: dict[str, Any] = {"options": options, "per_job": per_job, "nodes": nodes}
        return requests(self.planned, self.folder, where=where, project=self.project, **chosen)

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
        if not self.runs and not (self.results / "comparison.json").is_file():
            raise RecordError(
                f"compare the runs of {self.name}",
                found="no run, and no saved comparison",
                rule="runs come first",
                fix="launch() and compare(), or run(), which does both and writes the report",
            )
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
        """Launch, wait, compare and report in one call, never detached; an interrupt (Ctrl-C) cancels what runs.

        Args:
            notebook: see `report`.
            on_event: called with every step and end of a run, on this thread.
            launching: arguments of `launch`, without ``detached`` and ``report``.

        Example:
            >>> Experiment("experiments/layout_parity/ablation.yaml").run(on_event=print).check()   # doctest: +SKIP
        """
        here = launching.get("where") == "here"  # there `launch` returns after the last event
        sweep = self.launch(**launching, detached=False, on_event=on_event if here else None).sweep
        assert sweep is not None, "launched just now"
        if not sweep.done:
            threading.Thread(target=_import_ahead, args=(notebook,), name="imports", daemon=False).start()
        try:
            sweep.follow(on_event if on_event and not here else lambda event: None)
            self.report(notebook=notebook)
        except KeyboardInterrupt:
            sweep.cancel()
            sweep.wait()
            raise
        finally:
            self.tracking.close()
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


def _import_ahead(notebook: bool) -> None:
    """Import what comparing and reporting need while this process would only wait: up to 4 s of one core."""
    of_a_notebook = ("workbench.report.notebook", "nbclient") if notebook else ()
    for name in ("workbench.compare.align", "workbench.report.page", *of_a_notebook):
        importlib.import_module(name)


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
