"""`workbench report`: write the report page again, from the saved comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tyro


def rebuild_report(experiment_dir: tyro.conf.Positional[Path], *, notebook: bool = True) -> Path:
    """Write an experiment's report page and notebook again, from its saved comparison.

    Args:
        experiment_dir: folder that holds comparison.json.
        notebook: also execute the report as a notebook, next to the page.

    Raises:
        RecordError: there is no comparison, or it is damaged.
    """
    from workbench.compare.comparison import Comparison
    from workbench.report.page import write_report

    page = write_report(Comparison.load(experiment_dir / "comparison.json"), experiment_dir / "report.html")
    if notebook:
        from workbench.report.notebook import write_notebook

        write_notebook(experiment_dir / "comparison.json")
    return page


def main(arguments: Sequence[str]) -> int:
    """Run `workbench report`."""
    print(f"report: {tyro.cli(rebuild_report, args=list(arguments), prog='workbench report')}")
    return 0
