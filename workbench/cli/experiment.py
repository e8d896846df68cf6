"""`workbench compare`, `report`, `cancel` and `export`: verbs of an experiment that has been launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from workbench.cli.terminal import answered, print_lines, safe, safe_lines, table, width
from workbench.errors import RecordError
from workbench.launch.ablation import differences
from workbench.launch.cancel import cancel_runs
from workbench.records.lookup import compared_at, look_up
from workbench.records.states import ENDED
from workbench.report.exporters import TRACKERS
from workbench.report.exporters.export import Exported, TrackerName, default_folder, export_runs

if TYPE_CHECKING:
    from workbench.compare.comparison import Comparison
    from workbench.records.directory import RunDirectory

_OF_VERDICT = (
    "name",
    "against",
    "verdict",
    "why",
    "factor",
    "factor_meaning",
    "first_step",
    "first_parameter",
    "state",
    "world_size",
    "evidence",
)
Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_EXPERIMENT")]


def compare(
    experiment_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")],
    reference: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REFERENCE")] = "",
) -> int:
    """Print the verdicts of an experiment; or of two runs the settings that differ, and if their bits do.

    Exit code 0: every configuration without a planted fault agrees; 1: one of them is different, vacuous, has an
    unsound baseline or failed, or the two runs differ; 2: invalid input.

    Args:
        experiment_dir: Folder, file or name of an experiment that holds comparison.json; or a run.
        reference: The run to compare it with.
    """
    from workbench.compare.comparison import Comparison

    if not reference:
        return print_verdicts(Comparison.load(compared_at(experiment_dir)))
    settings = differing_settings(experiment_dir, reference)
    print_lines(_settings_lines(settings))
    text, equal = certified(experiment_dir, reference)
    result = {"run": experiment_dir, "reference": reference, "settings": settings, "equal": equal, "text": text}
    if not answered(lambda: result):
        print_lines(safe_lines(text))
    return 0 if equal else 1


def print_verdicts(comparison: Comparison) -> int:
    """Print the verdicts; return 1 if a configuration without a planted fault does not agree, else 0."""
    from workbench.compare.seeds import identical_notes

    if answered(lambda: verdicts_json(comparison)):
        return 1 if comparison.disagreeing() else 0
    question = [comparison.question] if comparison.question else []
    print("\n".join([*question, *comparison.verdict_lines(width()), *identical_notes(comparison)]))
    return 1 if comparison.disagreeing() else 0


def differing_settings(run: str, reference: str) -> dict[str, list[Any]]:
    """Return setting -> its values in the reference and in the run, where these differ.

    Raises:
        RecordError: not one run each.
    """
    runs = [run for target in (reference, run) for run in look_up(target).opened()]
    return differences(runs[0].spec, runs[1].spec) if len(runs) == 2 else {}


def _settings_lines(settings: dict[str, list[Any]]) -> list[str]:
    if not settings:
        return ["settings: the same in both"]
    rows = [[f"  {key}", str(before), str(after)] for key, (before, after) in settings.items()]
    return table(rows, ["settings that differ", "reference", "run"], width=width())


def verdicts_json(comparison: Comparison) -> dict[str, Any]:
    """Return the verdicts as JSON data."""
    return {
        "experiment": comparison.experiment,
        "question": comparison.question,
        "agrees": not comparison.disagreeing(),
        "disagreeing": [configuration.name for configuration in comparison.disagreeing()],
        "configurations": [{name: getattr(c, name) for name in _OF_VERDICT} for c in comparison.configurations],
    }


def certified(run: str, reference: str) -> tuple[str, bool]:
    """Compare two runs (as `workbench status` finds them) by their certificates; name the first tensor that differs.

    Raises:
        RecordError: not one run each, or runs without certificates.

    Returns:
        The comparison as text with its evidence, and True only if there was something to compare and it is the same.
    """
    from workbench.compare.certificates import compare_certificates

    runs = [run for target in (run, reference) for run in look_up(target).opened()]
    result = compare_certificates(runs[0], runs[1]) if len(runs) == 2 else None
    if result is None:
        raise RecordError(
            f"compare {run} with {reference}",
            found="no certificates in one of them" if len(runs) == 2 else f"{len(runs)} runs",
            rule="two runs, each with a certificate of its steps",
            fix="set record: {certificate: true} and run again; the reproducible mode always records one",
        )
    evidence = "" if result.evidence is None else f"\ncould have seen: {result.evidence.summary()}"
    return f"{result}{evidence}", result.verdict == "equal"


def report(experiment_dir: tyro.conf.Positional[str], *, notebook: bool = True) -> int:
    """Write an experiment's report page and notebook again, from its saved comparison.

    Args:
        experiment_dir: Folder, file or name of an experiment that holds comparison.json.
        notebook: also execute the report as a notebook, next to the page.
    """
    from workbench.experiment import rebuild_report

    page = rebuild_report(compared_at(experiment_dir), notebook=notebook)
    if not answered(lambda: {"report": str(page)}):
        print(f"report: {page}")
    return 0


def cancel(run_or_experiment: Target) -> int:
    """Cancel a run, or all runs of an experiment that have not ended, and wait until they have.

    Exit code 0 if all of them have ended now, 1 if one has not.

    Args:
        run_or_experiment: A folder, an experiment's name, or the beginning of a run's name.
    """

    def on_end(run: RunDirectory, state: str, had_ended: bool) -> None:
        if had_ended:
            outcome = f"had ended before: {state}"
        elif state in ENDED:
            outcome = state + ("" if state == "cancelled" else ", before it could be cancelled")
        else:
            outcome = f"still {state}; cancellation was requested and is not complete"
        print_lines([f"{safe(run.path.name)}: {outcome}"])

    runs = look_up(run_or_experiment).opened()
    states = cancel_runs(runs, on_end=on_end)
    answered(lambda: [{"run": run.path.name, "state": state} for run, state in zip(runs, states, strict=True)])
    return 0 if all(state in ENDED for state in states) else 1


def export(
    run_or_experiment: Target, *, to: TrackerName, project: str = "workbench", folder: Path | None = None
) -> int:
    """Export runs that have ended to a tracker, offline: nothing is sent anywhere.

    Exporting again adds what is new and leaves the rest alone. Exit code 1 if a run was left out.

    Args:
        run_or_experiment: A folder, an experiment's name, or the beginning of a run's name.
        to: The tracker; each is an extra, as in pip install 'workbench[wandb]'.
        project: The tracker's project, above the experiment.
        folder: Gets the tracker's files; by default runs/exports/<tracker> of the experiment.
    """
    runs = look_up(run_or_experiment).opened()
    exported = export_runs(runs, to=to, project=project, folder=folder)
    answered(lambda: [asdict(run) for run in exported])
    print_lines(export_lines(exported))
    left_out = [run for run in exported if run.outcome == "left out"]
    if len(left_out) < len(exported):
        where = folder or default_folder(runs[0], to)
        print_lines([f"to look at it: {TRACKERS[to].look.format(folder=where, project=project)}"])
    return 1 if left_out else 0


def export_lines(exported: Sequence[Exported]) -> list[str]:
    """Return the outcome of each run as text, and once each what the tracker could not store as it is."""
    lines = []
    for run in exported:
        steps = f", {run.steps} step{'' if run.steps == 1 else 's'}" if run.outcome == "exported" else ""
        lines.append(safe(f"{run.id}: {run.outcome}{steps}" + (f": {run.why}" if run.why else "")))
    notes = Counter(note for run in exported for note in run.notes)
    return lines + [safe(f"  in {count} run{'' if count == 1 else 's'}: {note}") for note, count in notes.items()]
