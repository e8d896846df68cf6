"""`workbench diagnose`: why does one run differ from another that is right?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.cli.terminal import safe_lines, say


def _diagnose(
    trusted: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TRUSTED")],
    suspect: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SUSPECT")],
    *,
    json: bool = False,
) -> int:
    """Why does one run differ from another that is right? Ranked causes, and what to try next.

    The verdict is "equal", "different", "vacuous" (no trained token or no gradient: nothing was there to compare) or
    "unsound baseline" (the trusted record is not finite). Exit code 0 for equal, 1 for any other verdict, 2 for input
    that is refused, such as stored gradients that do not have the norms that were recorded of them.

    Args:
        trusted: Folder of a run, or of a record that a recorder wrote.
        suspect: Likewise, the one in doubt.
        json: Print JSON.
    """
    from workbench.diagnose import diagnose
    from workbench.records.directory import to_json

    found = diagnose(trusted, suspect)
    if json:
        print(to_json(in_plain(found)).decode(), end="")
    else:
        say(safe_lines(str(found)))
    return 0 if found.equal else 1


def in_plain(diagnosis: Any) -> dict[str, Any]:
    """A diagnosis as numbers and words."""
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
    """Do `workbench diagnose`: exit code 0 if the two are equal, 1 for any other verdict."""
    return tyro.cli(_diagnose, args=list(arguments), prog="workbench diagnose", config=(tyro.conf.FlagCreatePairsOff,))
