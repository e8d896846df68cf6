"""Draw one figure of a saved comparison as an SVG file: `python -m workbench.report EXPERIMENT OUT.svg`.

For a README or a slide. Letters are curves, so that it looks the same everywhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from workbench.compare.comparison import Comparison
from workbench.report import figures
from workbench.report.style import save_svg

FIGURES = ("verdicts", "gradient_norm_by_step", "norm_ratios", "importance_ratios", "loss_by_step", "time_and_memory")


def main(arguments: Sequence[str] | None = None) -> Path:
    """Draw the requested figure, and return its path."""
    parser = argparse.ArgumentParser("python -m workbench.report", description="Draw one figure of a saved comparison.")
    parser.add_argument("experiment", type=Path, help="folder that holds comparison.json")
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("--figure", choices=FIGURES, default="verdicts")
    options = parser.parse_args(arguments)
    comparison = Comparison.load(options.experiment / "comparison.json")
    return save_svg(getattr(figures, options.figure)(comparison), options.out)


if __name__ == "__main__":
    main()
