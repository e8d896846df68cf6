"""`workbench report`: the report page again, from the saved comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated


def rebuild_report(experiment_dir: Path) -> Path:
    """Write an experiment's report page from its saved comparison.

    Raises:
        RecordError: there is no comparison, or it is damaged.
    """
    from workbench.compare.comparison import Comparison
    from workbench.report.page import write_report

    return write_report(Comparison.load(experiment_dir / "comparison.json"), experiment_dir / "report.html")


def main(arguments: Sequence[str]) -> int:
    """Do `workbench report`."""
    import tyro

    def report(experiment_dir: Annotated[Path, tyro.conf.Positional]) -> Path:
        """Write an experiment's report page again, from its saved comparison.

        Args:
            experiment_dir: folder that holds comparison.json.
        """
        return rebuild_report(experiment_dir)

    print(f"report: {tyro.cli(report, args=list(arguments), prog='workbench report')}")
    return 0
