"""`workbench bisect`: find the first module and block of tokens where two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from workbench.cli.terminal import print_lines, safe_lines

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
    same bits, and the first is not finite). Exit code 0 for equal, 1 for any other verdict, 2 for invalid input.

    Args:
        a: A run (as `workbench status` finds it), a YAML file with a spec, or FILE:NAME, a run that an ablation plans.
        b: Likewise.
        block_tokens: Tokens of a block; by default those of the reproducible mode, or 64.
        steps: Maximum number of optimizer steps.
        json: Print JSON.
    """
    from workbench.compare.bisect import bisect
    from workbench.records.directory import to_json

    names = (_short_name(a), _short_name(b))
    bisection = bisect(spec_or_target(a), spec_or_target(b), names=names, block_tokens=block_tokens, steps=steps)
    if json:
        print(
            to_json(
                {
                    "verdict": bisection.verdict,
                    "equal": bisection.equal,
                    **asdict(bisection),
                    "evidence": bisection.evidence and bisection.evidence.as_json(),
                }
            ).decode(),
            end="",
        )
    else:
        print_lines(safe_lines(str(bisection)))
    return 0 if bisection.equal else 1


def _short_name(target: str) -> str:
    return Path(target.rpartition(":")[2]).name.removesuffix(".yaml")


def spec_or_target(target: str) -> Any:
    """Return the spec of a run of an ablation if the argument names one; anything else unchanged.

    Raises:
        SpecError: the ablation plans no run of that name, or none is named.
    """
    from workbench.errors import SpecError
    from workbench.launch.ablation import load_ablation
    from workbench.specs.run import read_yaml

    file, _, name = target.rpartition(":")
    if Path(target).suffix in _YAML and "configurations" in (read_yaml(Path(target)) or {}):
        file, name = target, ""
    elif Path(file).suffix not in _YAML:
        return target
    planned = {run.name: run.spec for run in load_ablation(file).expand()}
    if name not in planned:
        raise SpecError(
            f"bisect {target}",
            found=f"no run {name!r} in {file}" if name else f"an ablation of {len(planned)} runs",
            rule=f"one of {', '.join(planned)}",
            fix=f"name one of its runs, as {file}:{next(iter(planned))}",
        )
    return planned[name]


def main(arguments: Sequence[str]) -> int:
    """Run `workbench bisect`: exit code 0 if the two are equal, 1 for any other verdict."""
    return tyro.cli(_bisect, args=list(arguments), prog="workbench bisect", config=(tyro.conf.FlagCreatePairsOff,))
