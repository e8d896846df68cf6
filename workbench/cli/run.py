"""`workbench run`: run an ablation, compare, save, report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.cli.experiment import print_verdicts, verdicts_json
from workbench.cli.terminal import answered, print_lines, table, width
from workbench.errors import SpecError, did_you_mean, listed
from workbench.experiment import Experiment
from workbench.launch.ablation import load_ablation
from workbench.launch.run import Where
from workbench.launch.schema import settings_by_name
from workbench.launch.task import RunEvent
from workbench.report.exporters.export import TrackerName
from workbench.specs.mistakes import nearest_settings
from workbench.specs.reading import flatten, parse_spec
from workbench.specs.run import RunSpec

KINDS = ("--loss.name", "--loss.surrogate.kind", "--loss.correction.kind")
"""Flags that decide which other settings there are."""

_DESCRIPTION = (
    "Run an ablation (or one spec), compare its runs and write the report. Exit code 0: every configuration without a "
    "planted fault agrees; 1: one of them is different, vacuous, has an unsound baseline, or failed; 2: invalid input."
)
_Switch = tyro.conf.FlagCreatePairsOff[bool]


@dataclasses.dataclass
class _Options:
    """Options of the verb, without the settings of its runs."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="ABLATION_OR_SPEC.yaml")]
    """YAML of an ablation or of one run's spec."""
    where: Where = "torchx"
    """torchx jobs, ranks of a process pool, one rank in this process, or a cluster."""
    only: tuple[str, ...] = ()
    """Only these configurations or runs, and all that they need."""
    fresh: _Switch = False
    """Run all again, also what is there."""
    force: _Switch = False
    """Run changed configurations again, next to their old runs, instead of raising an error."""
    detached: _Switch = False
    """Return at once: another process launches and reports, also after this terminal is gone."""
    dry_run: _Switch = False
    """Print every job's request alone."""
    per_job: int | None = None
    """Runs of one world size that share a job, one after another; by default chosen here."""
    nodes: int = 1
    """Machines, each with as many ranks."""
    notebook: bool = True
    """Execute the report as a notebook too, next to the page."""
    track: TrackerName | None = None
    """Send the runs to a tracker while they continue; offline, unless the tracker's own environment says otherwise."""
    scheduler: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Options of the cluster's scheduler, such as partition=gpu or queue=default."""


def run(arguments: Sequence[str]) -> int:
    """Run `workbench run`; 0 if every configuration without a planted fault agrees, else 1."""
    # the file's own settings are the defaults of the options, so it is read first
    path = next((Path(a) for a in arguments if a.endswith((".yaml", ".yml"))), None)
    base = parse_spec(RunSpec, load_ablation(path).base, where="base") if path else RunSpec()
    chosen = _kinds(arguments)
    if {"-h", "--help"}.intersection(arguments):
        return _short_help()
    settings = Annotated[RunSpec, tyro.conf.arg(name="", help="Settings of every run, over the file's base.")]
    defaults = dataclasses.field(default=base.merged(chosen) if chosen else base)
    _refuse_unknown_flags(arguments, base.merged(chosen) if chosen else base)
    options: Any = tyro.cli(  # of a class that exists only here: the defaults come from the file
        dataclasses.make_dataclass("RunOptions", [("settings", settings, defaults)], bases=(_Options,)),
        args=["--help" if argument == "--help-all" else argument for argument in arguments],
        prog="workbench run",
        description=_DESCRIPTION,
        config=(tyro.conf.AvoidSubcommands,),  # the surrogate's settings are flags, those of the chosen kind
    )
    if path is None:
        raise SpecError(
            f"run {options.file}",
            found="another kind of file",
            rule="a file that ends in .yaml or .yml",
            fix="experiments/ holds examples",
        )
    changes = _given(arguments, options.settings.model_dump(mode="json"))
    experiment = Experiment(path, only=options.only, changes=changes)
    launching: dict[str, Any] = {
        "where": options.where,
        "options": _options(options.scheduler),
        "per_job": options.per_job,
        "nodes": options.nodes,
    }
    if options.dry_run:
        requests = experiment.requests(**launching)
        if not answered(lambda: {"requests": requests}):
            for names, request in requests.items():
                print(f"# {names}\n{request}\n")
        return 0
    launching |= {"track": options.track, "fresh": options.fresh, "force": options.force}
    if options.detached:
        experiment.launch(**launching, detached=True, report=True)
        name = experiment.name
        answered(lambda: {"experiment": name, "folder": str(experiment.folder), "states": experiment.states()})
        print(f"{experiment!r}\n\nfollow them with `workbench attach {name}`, end them with `workbench cancel {name}`")
        return 0
    progress = _Progress()
    try:
        comparison = experiment.run(**launching, notebook=options.notebook, on_event=progress)
    except KeyboardInterrupt:
        progress.clear()
        hint = "Run the same command again to finish the remaining runs; runs with a checkpoint resume from it."
        print(hint, file=sys.stderr)
        raise
    progress.clear()
    print()
    code = print_verdicts(comparison)
    page, here = experiment.results / "report.html", Path.cwd()
    answered(lambda: verdicts_json(comparison) | {"report": str(page)})
    print(f"\nreport: {page.relative_to(here) if page.is_relative_to(here) else page}")
    return code


def _short_help() -> int:
    """Print the verb's own options, and the groups of settings in a line each."""
    groups = {name: setting.meaning for name, setting in settings_by_name().items() if "." not in name}
    rows = [[f"  --{name}{'.…' if settings_by_name()[name].settings else ''}", text] for name, text in groups.items()]
    with contextlib.suppress(SystemExit):
        tyro.cli(_Options, args=["--help"], prog="workbench run", description=_DESCRIPTION)
    print("Settings of every run, over the file's base, such as --layout.cp 2 (--help-all lists every one):\n")
    print_lines(table([[name, text.partition(". ")[0].rstrip(".")] for name, text in rows], width=width()))
    print("\n`workbench describe layout` lists the settings of a group, `workbench describe layout.cp` explains one.")
    return 0


def _refuse_unknown_flags(arguments: Sequence[str], spec: RunSpec) -> None:
    """Refuse a flag that nothing has, by name: tyro would report the argument that it misses next.

    Raises:
        SpecError: the flag, with the nearest settings, or the surrogate kinds that have it.
    """
    own = {field.name for field in dataclasses.fields(_Options)} | {"help", "help_all"}
    known = own | flatten(spec.model_dump(mode="json")).keys() | {"loss.surrogate.settings", "loss.settings"}
    groups = {name for name, setting in settings_by_name().items() if setting.settings}
    for flag in (
        argument.partition("=")[0] for argument in arguments if argument.startswith("--") and argument != "--"
    ):
        name = flag[2:].replace("-", "_")
        group, _, last = name.rpartition(".")
        plain = ".".join(filter(None, [group, last.removeprefix("no_")]))
        if name in known or plain in known or any(name.startswith(f"{each}.") for each in known):
            continue
        setting = settings_by_name().get(name)
        nearest = [each for each in nearest_settings(name, RunSpec) if each in known]
        # settings of the group that was named come before those of others
        nearest = [each for each in nearest if group and each.rpartition(".")[0] == group] or nearest
        near = [f"--{each.replace('_', '-')}" for each in nearest[:3]]
        if name in groups:
            found = f"a group of settings: {listed([f'{flag}.{each}' for each in _inside(name)], 6)}"
        elif setting is not None and setting.kinds:
            found = f"this loss is {spec.loss.surrogate.kind}; {name} is a setting of {', '.join(setting.kinds)}"
        else:
            of_verb = did_you_mean(name, sorted(own))  # an option of the verb comes before the end of a setting's name
            hint = f"did you mean {' or '.join(near)}?" if near and not of_verb else of_verb
            hint = hint or did_you_mean(name, sorted(known))
            found = f"no such flag{f'; {hint}' if hint else ''}"
        raise SpecError(
            f"run {flag}",
            found=found,
            rule="an option of the verb, or a dotted setting of runs",
            fix="`workbench run --help` lists the options and groups, `workbench describe GROUP` the settings of one",
        )


def _inside(group: str) -> list[str]:
    return [name.rpartition(".")[2] for name in settings_by_name()[group].settings]


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
            print(f"\r\x1b[K{str(event)[: width - 1]}", end="", flush=True)  # \r needs one line, not wrapped

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True)
