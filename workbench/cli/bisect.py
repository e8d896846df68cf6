"""`workbench bisect`: the first module and block of tokens where two runs part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.cli.terminal import safe_lines, say

_YAML = (".yaml", ".yml")


def _bisect(
    a: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="A")],
    b: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="B")],
    *,
    block_tokens: int | None = None,
    steps: int | None = None,
    json: bool = False,
) -> int:
    """Run two configurations again and name the first tensor, and block of tokens, in which they differ.

    The verdict is "equal", "different", "vacuous" (the same bits, and nothing was trained) or "unsound baseline" (the
    same bits, and the first is not finite). Exit code 0 for equal, 1 for any other verdict, 2 for refused input.

    Args:
        a: A run (as `workbench status` finds it), a YAML file with a spec, or FILE:NAME, a run that an ablation plans.
        b: Likewise.
        block_tokens: Tokens of a block; if left out those of the reproducible mode, or 64.
        steps: How many optimizer steps at most.
        json: Print JSON.
    """
    from workbench.compare.bisect import bisect
    from workbench.records.directory import to_json

    names = (_called(a), _called(b))
    found = bisect(meant(a), meant(b), names=names, block_tokens=block_tokens, steps=steps)
    if json:
        print(
            to_json(
                {
                    "verdict": found.verdict,
                    "equal": found.equal,
                    **asdict(found),
                    "evidence": found.evidence and found.evidence.as_json(),
                }
            ).decode(),
            end="",
        )
    else:
        say(safe_lines(str(found)))
    return 0 if found.equal else 1


def _called(asked: str) -> str:
    return Path(asked.rpartition(":")[2]).name.removesuffix(".yaml")


def meant(asked: str) -> Any:
    """The spec of a run that an ablation plans, where one is named; anything else as it was said.

    Raises:
        SpecError: the ablation plans no run of that name, or none is named.
    """
    from workbench.errors import SpecError
    from workbench.launch.ablation import load_ablation
    from workbench.specs.run import read_yaml

    file, _, name = asked.rpartition(":")
    if Path(asked).suffix in _YAML and "configurations" in (read_yaml(Path(asked)) or {}):
        file, name = asked, ""
    elif Path(file).suffix not in _YAML:
        return asked
    planned = {run.name: run.spec for run in load_ablation(file).expand()}
    if name not in planned:
        found = f"no run {name!r} in {file}" if name else f"an ablation of {len(planned)} runs"
        raise SpecError(
            f"bisect {asked}",
            found=found,
            rule=f"one of {', '.join(planned)}",
            fix=f"say which, as {file}:{next(iter(planned))}",
        )
    return planned[name]


def main(arguments: Sequence[str]) -> int:
    """Do `workbench bisect`: exit code 0 if the two are equal, 1 for any other verdict."""
    return tyro.cli(_bisect, args=list(arguments), prog="workbench bisect", config=(tyro.conf.FlagCreatePairsOff,))
