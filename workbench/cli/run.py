"""`workbench run`: run an ablation, compare, save, report."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec, PlannedRun, load_ablation, select
from workbench.launch.run import Where, launch, requests
from workbench.launch.sweep import RunEvent, Sweep
from workbench.records.directory import project_root, provenance
from workbench.records.lookup import experiment_folder
from workbench.specs.run import RunSpec, merge, parse_spec

if TYPE_CHECKING:
    from workbench.compare.comparison import Comparison

KINDS = ("--loss.name", "--loss.surrogate.kind", "--loss.correction.kind")
"""Flags that decide which other settings there are."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Content of a file, ready to launch."""

    question: str
    experiment_dir: Path
    chosen: list[PlannedRun]
    trial: bool
    whole: bool


def _plan(path: Path, only: Sequence[str], changes: Mapping[str, Any]) -> _Plan:
    whole = load_ablation(path)
    ablation = _changed(whole, changes, where=str(path))
    planned = ablation.expand(where=str(path))
    chosen = select(planned, only) if only else planned
    original = {plan.name: plan.spec for plan in whole.expand()}
    return _Plan(
        ablation.question,
        experiment_folder(path),
        chosen,
        whole=chosen == whole.expand(),
        trial=any(original.get(plan.name) != plan.spec for plan in chosen),
    )


def launch_ablation(
    path: Path | str,
    *,
    where: Where = "torchx",
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    project: Path | None = None,
    fresh: bool = False,
    force: bool = False,
    options: Mapping[str, str] | None = None,
) -> Sweep:
    """Launch the runs of an ablation and return at once; existing runs are not run again.

    Watch them with `attach`, end some with ``sweep.cancel(...)``, and call `conclude` for the verdicts and the report.

    Args:
        path: YAML of an ablation, or of one run's spec.
        where: what launches the ranks: "torchx", "processes", "here", "slurm" or "kubernetes"; see
            `workbench.launch.run`.
        only: names of configurations or runs; the runs that they need are added.
        changes: settings merged over the ablation's base.
        project: folder that relative paths in specs begin at; None takes `project_root`.
        fresh: run everything again; otherwise only what is missing: a run that succeeded with the same settings,
            rollout dataset, checkpoint and code is reused.
        force: run changed configurations again, instead of raising an error.
        options: options of the cluster's scheduler.

    Raises:
        SpecError: the file cannot be used, a configuration changed since it was last run, or it is running already.
        LaunchError: nothing could be started.

    Example:
        >>> sweep = wb.launch_ablation("experiments/layout_parity/ablation.yaml")   # doctest: +SKIP
        >>> wb.attach(sweep)                                                        # doctest: +SKIP
        >>> comparison, page = wb.conclude(sweep)                                   # doctest: +SKIP
    """
    plan = _plan(Path(path), only, changes or {})
    sweep = launch(
        plan.chosen,
        plan.experiment_dir,
        where=where,
        project=project,
        fresh=fresh,
        force=force,
        trial=plan.trial,
        options=options,
    )
    sweep.question, sweep.saved_in = plan.question, _saved_in(plan)
    return sweep


def conclude(
    sweep: Sweep,
    *,
    on_event: Callable[[RunEvent], None] | None = None,
    project: Path | None = None,
    notebook: bool = False,
) -> tuple[Comparison, Path]:
    """Wait for the end of a sweep, compare every run with its reference, save the comparison and write the report.

    Args:
        sweep: from `launch_ablation`.
        on_event: called with every step and end of a run, on this thread.
        project: as it was launched with.
        notebook: also execute the report as a notebook, ``report.ipynb`` next to the page.

    Returns:
        The comparison, and the path of the report page.
    """
    sweep.follow(on_event or (lambda event: None))

    from workbench.compare.align import Subject, compare_runs
    from workbench.report.page import write_report

    subjects = [
        Subject(plan.name, run, plan.reference, plan.truth) for plan, run in zip(sweep.planned, sweep.runs, strict=True)
    ]
    comparison = compare_runs(
        subjects,
        question=sweep.question,
        experiment=sweep.experiment_dir.name,
        provenance=provenance((project or project_root()).resolve()),
    )
    comparison.save(sweep.saved_in / "comparison.json")
    page = write_report(comparison, sweep.saved_in / "report.html")
    if notebook:
        from workbench.report.notebook import write_notebook

        write_notebook(sweep.saved_in / "comparison.json")
    return comparison, page


def run_ablation(
    path: Path | str,
    *,
    where: Where = "torchx",
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    project: Path | None = None,
    fresh: bool = False,
    force: bool = False,
    options: Mapping[str, str] | None = None,
    notebook: bool = False,
    on_event: Callable[[RunEvent], None] | None = None,
) -> tuple[Comparison, Path]:
    """Run an ablation, compare every run with its reference, save the comparison and write the report.

    `launch_ablation` and `conclude` in one call; interrupting it (Ctrl-C) cancels what runs.

    Args:
        path: YAML of an ablation, or of one run's spec.
        where: what launches the ranks, see `launch_ablation`.
        only: names of configurations or runs; the runs that they need are added.
        changes: settings merged over the ablation's base. Comparison and report of anything but the file's own runs are
            saved under the experiment's ``runs`` folder: neither a part nor a variation replaces the whole.
        project: folder that relative paths in specs begin at; None takes `project_root`.
        fresh: run everything again, not only what is missing.
        force: run changed configurations again, instead of raising an error.
        options: options of the cluster's scheduler.
        notebook: also execute the report as a notebook, ``report.ipynb`` next to the page.
        on_event: called with every step and end of a run.

    Returns:
        The comparison, and the path of the report page.

    Raises:
        SpecError: the file cannot be used, a configuration changed since it was last run, or it is running already.
        LaunchError: nothing could be started.
    """
    sweep = launch_ablation(
        path, where=where, only=only, changes=changes, project=project, fresh=fresh, force=force, options=options
    )
    try:
        return conclude(sweep, on_event=on_event, project=project, notebook=notebook)
    except KeyboardInterrupt:
        sweep.cancel()
        sweep.wait()
        raise


def dry_run(
    path: Path | str,
    *,
    where: Where,
    only: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    project: Path | None = None,
    options: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the exact request of every job, by name of the run. Nothing is written, started or contacted.

    Raises:
        SpecError: the file cannot be used.
        LaunchError: a run cannot be placed, or an option that the scheduler does not know.
    """
    plan = _plan(Path(path), only, changes or {})
    return requests(plan.chosen, plan.experiment_dir, where=where, project=project, options=options)


def _saved_in(plan: _Plan) -> Path:
    return plan.experiment_dir if plan.whole else plan.experiment_dir / "runs"


def main(arguments: Sequence[str]) -> int:
    """Run `workbench run`: exit code of `exit_code`, 2 for invalid input, 130 if interrupted."""
    # the file's own settings are the defaults of the options, so it is read first
    path = next((Path(a) for a in arguments if a.endswith((".yaml", ".yml"))), None)
    base = _base(load_ablation(path)) if path else RunSpec()
    chosen = _kinds(arguments)
    options_type = _options_type(base.merged(chosen) if chosen else base)
    options = tyro.cli(
        options_type,
        args=list(arguments),
        prog="workbench run",
        description="Run an ablation (or one spec), compare its runs and write the report. Exit code 0: "
        "every configuration without a planted fault agrees; 1: one of them is different, "
        "vacuous, has an unsound baseline, or failed; 2: invalid input.",
    )
    if path is None:
        raise SpecError(
            f"run {options.file}",
            found="another kind of file",
            rule="a file that ends in .yaml or .yml",
            fix="experiments/ holds examples",
        )
    requested: dict[str, Any] = {
        "where": options.where,
        "only": options.only,
        "options": _options(options.scheduler),
        "changes": _given(arguments, options.settings.model_dump(mode="json")),
    }
    if options.dry_run:
        for name, request in dry_run(path, **requested).items():
            print(f"# {name}\n{request}\n")
        return 0
    progress = _Progress()
    try:
        comparison, report = run_ablation(
            path, fresh=options.fresh, force=options.force, notebook=options.notebook, on_event=progress, **requested
        )
    except KeyboardInterrupt:
        progress.clear()
        hint = "Run the same command again to finish the remaining runs; runs with a checkpoint resume from it."
        print(hint, file=sys.stderr)
        raise
    progress.clear()
    print()
    print(verdict_table(comparison))
    print(f"\nreport: {_shown(report)}")
    return exit_code(comparison)


def exit_code(comparison: Comparison) -> int:
    """Return 1 if a configuration without a planted fault is different, vacuous, unsound or failed; else 0."""
    return 1 if comparison.disagreeing() else 0


def verdict_table(comparison: Comparison) -> str:
    """Return the verdicts as lines of text."""
    from workbench.compare.seeds import identical_notes

    question = [comparison.question] if comparison.question else []
    return "\n".join([*question, *comparison.verdict_lines(), *identical_notes(comparison)])


def _options_type(base: RunSpec) -> type[Any]:
    """Build the type of the verb's options from the spec's model, with the file's settings as defaults."""
    settings = Annotated[RunSpec, tyro.conf.arg(name="", help="Settings of every run, over the file's base.")]
    return dataclasses.make_dataclass(
        "RunOptions",
        [
            (
                "file",
                Annotated[
                    Path,
                    tyro.conf.Positional,
                    tyro.conf.arg(help="YAML of an ablation or of one run's spec.", metavar="ABLATION_OR_SPEC.yaml"),
                ],
            ),
            (
                "where",
                Annotated[
                    Where,
                    tyro.conf.arg(
                        help="A torchx job for each run, ranks of a process pool, one rank in this process, or "
                        "a cluster."
                    ),
                ],
                "torchx",
            ),
            (
                "only",
                Annotated[
                    tuple[str, ...], tyro.conf.arg(help="Only these configurations or runs, and all that they need.")
                ],
                (),
            ),
            (
                "fresh",
                Annotated[
                    bool,
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.arg(help="Run everything again, not only what is missing."),
                ],
                False,
            ),
            (
                "force",
                Annotated[
                    bool,
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.arg(
                        help="Run changed configurations again, next to their old runs, instead of raising an error."
                    ),
                ],
                False,
            ),
            (
                "dry_run",
                Annotated[
                    bool,
                    tyro.conf.FlagCreatePairsOff,
                    tyro.conf.arg(help="Print the exact request of every job, and do nothing."),
                ],
                False,
            ),
            (
                "notebook",
                Annotated[bool, tyro.conf.arg(help="Execute the report as a notebook too, next to the page.")],
                True,
            ),
            (
                "scheduler",
                Annotated[
                    tuple[str, ...],
                    tyro.conf.arg(
                        help="Options of the cluster's scheduler, such as partition=gpu or queue=default.",
                        metavar="KEY=VALUE",
                    ),
                ],
                (),
            ),
            ("settings", settings, dataclasses.field(default=base)),
        ],
    )


def _base(ablation: AblationSpec) -> RunSpec:
    return parse_spec(RunSpec, ablation.base, where="base")


def _changed(ablation: AblationSpec, changes: Mapping[str, Any], *, where: str) -> AblationSpec:
    """Merge settings over the base of an ablation; raise an error for those that an axis overrides."""
    for axis in ablation.axes:
        value: Any = changes
        for key in axis.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            raise SpecError(
                f"{where}: set {axis} = {value} for every run",
                found=f"{axis} is an axis",
                rule="an axis gives every configuration its values",
                fix="use --only to choose runs, or change the axis in the file",
            )
    return ablation.model_copy(update={"base": merge(ablation.base, changes)})


def _given(arguments: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the arguments give, nested; also those that are equal to the file's."""
    given: dict[str, Any] = {}
    for flag in (a[2:].partition("=")[0].replace("-", "_") for a in arguments if a.startswith("--")):
        *groups, last = flag.split(".")
        value, into = settings, given
        for group in groups:
            value, into = value[group], into.setdefault(group, {})
        name = last if last in value else last.removeprefix("no_")
        if name in value:
            into[name] = value[name]
    return given


def _options(pairs: Sequence[str]) -> dict[str, str]:
    if bad := [pair for pair in pairs if "=" not in pair]:
        raise SpecError(
            f"--scheduler {' '.join(bad)}",
            rule="options are KEY=VALUE, such as partition=gpu",
            fix="write an equals sign between option and value",
        )
    return dict(pair.split("=", 1) for pair in pairs)


def _kinds(arguments: Sequence[str]) -> dict[str, Any]:
    """Return names and kinds among the arguments, nested: other settings and their defaults depend on them."""
    parts = [part for a in arguments for part in (a.split("=", 1) if a.startswith("--") else [a])]
    chosen: dict[str, Any] = {}
    for flag, value in itertools.pairwise(parts):
        if flag in KINDS:
            *groups, last = flag[2:].split(".")
            into = chosen
            for group in groups:
                into = into.setdefault(group, {})
            into[last] = value
    return chosen


class _Progress:
    """Print a line when a run ends and, on a terminal, a line that follows the current run."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()

    def __call__(self, event: RunEvent) -> None:
        if event.number:
            self.clear()
            print(event, flush=True)
        elif self.live:
            width = os.get_terminal_size().columns
            print(f"\r\x1b[K{str(event)[: width - 1]}", end="", flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True)


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
