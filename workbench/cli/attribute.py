"""`workbench attribute`: where the gap between trainer and sampler comes from, and how much of it is safe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.terminal import answered, print_lines, safe_lines


def attribute(
    case: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CASE")],
    *,
    page: Path | None = None,
    draws: int = 8,
    device: str = "cpu",
) -> int:
    """Split the gap between trainer's and sampler's log-probabilities into its causes, each switched alone.

    Exit code 0 if no cause was found that the settings do not state and the rest is at the floor, 1 otherwise, 2 for
    invalid input.

    Args:
        case: Folder with attribute.yaml (docs/guides/trainer-and-sampler.md).
        page: Write the result as one HTML page to this file.
        draws: Draws of the floor on each side; 0 measures none, and raises no alarm.
        device: Where the record is computed again, such as cuda.
    """
    from workbench.mismatch import attribute as attribute_case  # torch; mistakes above are told without it

    result = attribute_case(case, draws=draws, device=device)
    if page is not None:
        from workbench.report.mismatch import write_page

        write_page(result, page, title=case.name)
    if not answered(result.as_json):
        print_lines(safe_lines(str(result)))
    return 0 if result.ok else 1
