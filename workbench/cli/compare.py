"""`workbench compare`: the verdicts of an experiment, printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tyro

from workbench.cli.run import verdict_table


def saved_verdicts(experiment_dir: tyro.conf.Positional[Path]) -> tuple[str, int]:
    """Print the verdicts of an experiment, from its saved comparison.

    Args:
        experiment_dir: folder that holds comparison.json.

    Returns:
        The verdicts as lines of text, and how many runs failed.
    """
    from workbench.compare.comparison import Comparison

    comparison = Comparison.load(experiment_dir / "comparison.json")
    failed = sum(c.verdict == "failed" for c in comparison.configurations)
    return verdict_table(comparison), failed


def main(arguments: Sequence[str]) -> int:
    """Do `workbench compare`: exit code 1 if a run failed."""
    text, failed = tyro.cli(saved_verdicts, args=list(arguments), prog="workbench compare")
    print(text)
    return 1 if failed else 0
