"""`workbench sensitivity`: the known bugs that a comparison would have rejected, and those that it would accept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import tyro

from workbench.cli.terminal import answered, print_lines, safe_lines
from workbench.errors import SpecError


def sensitivity(
    ablation: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ABLATION")],
    *,
    configurations: tuple[str, ...] = (),
    faults: tuple[str, ...] = (),
    remedies: bool = True,
    dataset: Path | None = None,
    save: Path | None = None,
    least: float | None = None,
) -> int:
    """Plant every known bug that an ablation admits, and tell which its comparison rejects, which survive, and why.

    All runs are on simulated ranks of this process, compared with the ablation's own budgets. Exit code 0, or 1 if
    the score is below --least, 2 for invalid input.

    Args:
        ablation: YAML file of an ablation, or the folder that has it.
        configurations: Configurations or runs in which bugs are planted; by default those in float64.
        faults: Bugs to plant, by name; all that are admissible if none is named.
        remedies: Search the smallest change of data or settings that kills each survivor.
        dataset: Folder of a generated rollout dataset of fewer than 200 tokens, and its own kills.
        save: File of the record, as JSON.
        least: Lowest score, between 0 and 1, of faults that make a gradient wrong.
    """
    if least is not None and not 0 <= least <= 1:
        raise SpecError(
            f"workbench sensitivity --least {least:g}",
            rule="a score is a share, between 0 and 1",
            fix="give a share, such as 0.5",
        )
    from workbench.mutation_score import sensitivity  # torch; mistakes above are told without it

    record = sensitivity(
        ablation,
        configurations=configurations,
        faults=faults,
        remedies=remedies,
        dataset=dataset,
        report_progress=lambda line: print(line, file=sys.stderr),
        command=" ".join(["workbench sensitivity", Path(ablation).name, *configurations]),
    )
    if save is not None:
        record.save(save)
    if not answered(record.as_json):
        print_lines(safe_lines(str(record)))
    killed, admissible = record.of_gradients
    return int(least is not None and admissible > 0 and killed / admissible < least)
