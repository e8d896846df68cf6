"""`workbench compare`: the verdicts of an experiment, printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated


def main(arguments: Sequence[str]) -> int:
    """Do `workbench compare`: exit code 1 if a run failed."""
    import tyro

    def compare(experiment_dir: Annotated[Path, tyro.conf.Positional]) -> Path:
        """Print the verdicts of an experiment, from its saved comparison.

        Args:
            experiment_dir: folder that holds comparison.json.
        """
        return experiment_dir

    experiment_dir = tyro.cli(compare, args=list(arguments), prog="workbench compare")

    from workbench.cli.run import verdict_table
    from workbench.compare.comparison import Comparison

    comparison = Comparison.load(experiment_dir / "comparison.json")
    print(verdict_table(comparison))
    return 1 if any(c.verdict == "failed" for c in comparison.configurations) else 0
