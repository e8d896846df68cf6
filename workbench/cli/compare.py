"""`workbench compare`: print the verdicts of an experiment, or compare two runs bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.run import exit_code, verdict_table
from workbench.cli.terminal import print_lines, safe_lines


def saved_verdicts(experiment_dir: Path) -> tuple[str, int]:
    """Return the verdicts of an experiment, from its saved comparison.

    Args:
        experiment_dir: folder that holds comparison.json.

    Returns:
        The verdicts as lines of text, and their exit code; see `workbench.cli.run.exit_code`.
    """
    from workbench.compare.comparison import Comparison

    comparison = Comparison.load(experiment_dir / "comparison.json")
    return verdict_table(comparison), exit_code(comparison)


def certified(run: str, reference: str) -> tuple[str, bool]:
    """Compare two runs bit for bit by their certificates, and name the first tensor that differs.

    Args:
        run: as `workbench status` finds it.
        reference: likewise.

    Raises:
        RecordError: not one run each, or runs without certificates.

    Returns:
        The comparison as text with its evidence, and True only if there was something to compare and it is the same.
    """
    from workbench.compare.certificates import compare_certificates
    from workbench.errors import RecordError
    from workbench.records.lookup import look_up

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


def _compare(
    experiment_dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")],
    reference: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REFERENCE")] = "",
) -> int:
    """Print the verdicts of an experiment; or, given two runs, compare their certificates.

    Exit code 0: every configuration without a planted fault agrees; 1: one of them is different, vacuous, has an
    unsound baseline or failed, or the two runs differ; 2: invalid input.

    Args:
        experiment_dir: Folder that holds comparison.json; or a run.
        reference: The run to compare it with.
    """
    if reference:
        text, equal = certified(experiment_dir, reference)
        print_lines(safe_lines(text))
        return 0 if equal else 1
    text, code = saved_verdicts(Path(experiment_dir))
    print(text)
    return code


def main(arguments: Sequence[str]) -> int:
    """Run `workbench compare`: exit code 1 if configurations do not agree, or if two runs differ."""
    return tyro.cli(_compare, args=list(arguments), prog="workbench compare")
