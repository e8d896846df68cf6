"""`workbench diagnose`: rank the causes why a run differs from a trusted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.cli.terminal import print_lines, safe_lines


def _diagnose(
    trusted: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TRUSTED")],
    suspect: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SUSPECT")],
    *,
    json: bool = False,
) -> int:
    """Rank the causes why a run differs from a trusted one, and propose the next experiment.

    The verdict is "equal", "different", "vacuous" (no trained token or no gradient: nothing to compare) or
    "unsound baseline" (the trusted record is not finite). Exit code 0 for equal, 1 for any other verdict, 2 for
    invalid input, such as stored gradients whose norms are not the recorded ones.

    Args:
        trusted: Folder of a run, or of a record that a recorder wrote.
        suspect: Likewise, the one in doubt.
        json: Print JSON.
    """
    from workbench.diagnose import diagnose
    from workbench.records.directory import to_json

    diagnosis = diagnose(trusted, suspect)
    if json:
        print(to_json(as_json(diagnosis)).decode(), end="")
    else:
        print_lines(safe_lines(str(diagnosis)))
    return 0 if diagnosis.equal else 1


def as_json(diagnosis: Any) -> dict[str, Any]:
    """Return a diagnosis as JSON data."""
    following = diagnosis.next_experiment()
    causes = [asdict(cause) | {"needs": sorted(cause.needs)} for cause in diagnosis.causes]
    return {
        "trusted": diagnosis.trusted,
        "suspect": diagnosis.suspect,
        "verdict": diagnosis.verdict,
        "equal": diagnosis.equal,
        "evidence": diagnosis.sight and diagnosis.sight.as_json(),
        "first_step": diagnosis.evidence.first.number,
        "causes": causes,
        "next_experiment": following and asdict(following),
    }


def main(arguments: Sequence[str]) -> int:
    """Run `workbench diagnose`: exit code 0 if the two are equal, 1 for any other verdict."""
    return tyro.cli(_diagnose, args=list(arguments), prog="workbench diagnose", config=(tyro.conf.FlagCreatePairsOff,))
