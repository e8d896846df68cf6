"""`workbench run`: run an ablation, compare, save, report."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from workbench.errors import SpecError
from workbench.launch.ablation import AblationSpec, load_ablation, select
from workbench.launch.run import RunEvent, launch
from workbench.runs.spec import RunSpec, merge, parse_spec
from workbench.runs.store import project_root, provenance

if TYPE_CHECKING:
    from workbench.compare.comparison import Comparison

KINDS = ("--loss.name", "--loss.surrogate.kind", "--loss.correction.kind")
"""Flags that decide which other settings there are."""


def run_ablation(path: Path | str, *, where: Literal["torchx", "here"] = "torchx", only: Sequence[str] = (),
                 changes: Mapping[str, Any] | None = None, project: Path | None = None, reuse: bool = False,
                 on_event: Callable[[RunEvent], None] | None = None) -> tuple[Comparison, Path]:
    """Run an ablation, hold every run against its reference, save the comparison and write the report.

    Args:
        path: YAML of an ablation, or of one run's spec.
        where: "torchx" makes a job of each run; "here" runs one rank in this process.
        only: names of configurations or runs; all that they need is added.
        changes: settings laid over the ablation's base. Comparison and report of anything but the file's own runs are
            saved under the experiment's ``runs`` folder: neither a part nor a variation replaces the whole.
        project: folder that relative paths in specs begin at; None takes `project_root`.
        reuse: take earlier runs that succeeded with the same settings, recording, checkpoint and code.
        on_event: told about every step and end of a run.

    Returns:
        The comparison, and the path of the report page.

    Raises:
        SpecError: the file cannot be used.
        LaunchError: nothing could be started.
    """
    path, project = Path(path), (project or project_root()).resolve()
    whole = load_ablation(path)
    ablation = _changed(whole, changes or {}, where=str(path))
    planned = ablation.expand(where=str(path))
    chosen = select(planned, only) if only else planned
    experiment_dir = experiment_folder(path)
    runs = launch(chosen, experiment_dir, where=where, project=project, reuse=reuse, on_event=on_event)

    from workbench.compare.align import Subject, compare_runs
    from workbench.report.page import write_report

    subjects = [Subject(plan.name, run, plan.reference, plan.truth)
                for plan, run in zip(chosen, runs, strict=True)]
    comparison = compare_runs(subjects, question=ablation.question, experiment=experiment_dir.name,
                              provenance=provenance(project))
    saved_in = experiment_dir if chosen == whole.expand() else experiment_dir / "runs"
    comparison.save(saved_in / "comparison.json")
    return comparison, write_report(comparison, saved_in / "report.html")


def experiment_folder(path: Path) -> Path:
    """Where the runs and report of a file go: beside ``ablation.yaml``, else in a folder of its name."""
    path = path.resolve()
    return path.parent if path.stem == "ablation" else path.parent / path.stem


def main(arguments: Sequence[str]) -> int:
    """Do `workbench run`."""
    # the file's own settings are the defaults of the options, so it is read first
    path = next((Path(a) for a in arguments if a.endswith((".yaml", ".yml"))), None)
    base = _base(load_ablation(path)) if path else RunSpec()
    chosen = _kinds(arguments)
    described = _described(base.merged(chosen) if chosen else base)
    options = tyro.cli(described, args=list(arguments), prog="workbench run",
                       description="Run an ablation (or one spec), compare its runs and write the report.")
    if path is None:
        raise SpecError(f"run {options.file}", found="another kind of file",
                        rule="a file that ends in .yaml or .yml", fix="experiments/ holds examples")
    changes = _given(arguments, options.settings.model_dump(mode="json"))
    progress = _Progress()
    comparison, report = run_ablation(path, where=options.where, only=options.only, changes=changes,
                                      reuse=options.reuse, on_event=progress)
    progress.clear()
    print()
    print(verdict_table(comparison))
    print(f"\nreport: {_shown(report)}")
    return 1 if any(c.verdict == "failed" for c in comparison.configurations) else 0


def verdict_table(comparison: Comparison) -> str:
    """The verdicts as lines of text."""
    lines = [comparison.question] if comparison.question else []
    width = max((len(c.name) for c in comparison.configurations), default=0)
    for c in comparison.configurations:
        factor = "" if c.factor is None else f"x {c.factor:.4g}"
        meaning = f"= {c.factor_meaning}" if c.factor_meaning else ""
        parts = [f"{c.name:<{width}}", f"{c.verdict:<13}", factor, meaning, c.why]
        lines.append("  ".join(part for part in parts if part))
    return "\n".join(lines)


def _described(base: RunSpec) -> type[Any]:
    """The options of the verb, made from the spec's own model with the file's settings as defaults."""
    settings = Annotated[RunSpec, tyro.conf.arg(name="", help="Settings of every run, over the file's base.")]
    return dataclasses.make_dataclass("RunOptions", [
        ("file", Annotated[Path, tyro.conf.Positional, tyro.conf.arg(
            help="YAML of an ablation or of one run's spec.", metavar="ABLATION_OR_SPEC.yaml")]),
        ("where", Annotated[Literal["torchx", "here"], tyro.conf.arg(
            help="A torchx job for each run, or one rank in this process.")], "torchx"),
        ("only", Annotated[tuple[str, ...], tyro.conf.arg(
            help="Only these configurations or runs, and all that they need.")], ()),
        ("reuse", Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(
            help="Take earlier runs that succeeded with the same settings, recording, checkpoint and code.")], False),
        ("settings", settings, dataclasses.field(default=base)),
    ])


def _base(ablation: AblationSpec) -> RunSpec:
    return parse_spec(RunSpec, ablation.base, where="base")


def _changed(ablation: AblationSpec, changes: Mapping[str, Any], *, where: str) -> AblationSpec:
    """The ablation with settings laid over its base; refuses those that an axis would overrule."""
    for axis in ablation.axes:
        value: Any = changes
        for key in axis.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            raise SpecError(f"{where}: set {axis} = {value} for every run", found=f"{axis} is an axis",
                            rule="an axis gives every configuration its values",
                            fix="use --only to choose runs, or change the axis in the file")
    return ablation.model_copy(update={"base": merge(ablation.base, changes)})


def _given(arguments: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that stand among the arguments, nested; also those that say what the file says."""
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


def _kinds(arguments: Sequence[str]) -> dict[str, Any]:
    """Names and kinds among the arguments, nested: they decide which other settings there are, and their defaults."""
    words = [word for a in arguments for word in (a.split("=", 1) if a.startswith("--") else [a])]
    chosen: dict[str, Any] = {}
    for flag, value in itertools.pairwise(words):
        if flag in KINDS:
            *groups, last = flag[2:].split(".")
            into = chosen
            for group in groups:
                into = into.setdefault(group, {})
            into[last] = value
    return chosen


class _Progress:
    """Prints a line when a run ends and, on a terminal, one that follows the run that goes on."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()

    def __call__(self, event: RunEvent) -> None:
        if event.number:
            self.clear()
            print(event, flush=True)
        elif self.live:
            width = os.get_terminal_size().columns
            print(f"\r\x1b[K{str(event)[:width - 1]}", end="", flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True)


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
