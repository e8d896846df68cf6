"""Scaling contracts: what each system sums, divides and multiplies from the tokens of a micro-batch to the optimizer.

One `ScalingSpec` per backend or mode of a system, in ``CONTRACTS`` of its `translate` module. `workbench.reduction`
executes it: as ``loss.scaling`` it is an axis of an ablation, and a run shows its effect on every gradient. Versions
are those of the systems' modules; comments at each contract say what was read of gathers and schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.errors import SpecError
from workbench.reduction.scaling import scaling_factor
from workbench.specs.losses import ScalingSpec
from workbench.systems.registry import SYSTEMS, load_system

if TYPE_CHECKING:
    import pandas as pd


def scaling_contract(system: str, mode: str | None = None) -> ScalingSpec:
    """Return the contract of a system, for ``loss.scaling``.

    Args:
        system: one of `SYSTEMS`.
        mode: its backend or mode; None: the first one.

    Raises:
        SpecError: unknown system or mode.
    """
    modes = load_system(system).scaling
    if mode is None:
        return next(iter(modes.values()))
    if mode not in modes:
        raise SpecError(
            f"scaling contract {mode!r} of {system}",
            rule=f"one of {', '.join(map(repr, modes))}",
            fix="choose one of them",
        )
    return modes[mode]


def contract_table(dp: int = 2, cp: int = 2, micro_batches: int = 4, accumulation: int = 1) -> pd.DataFrame:
    """Tabulate every system's contract and the factor that it leaves on a gradient, one row per system and mode.

    Args:
        dp: data-parallel ranks.
        cp: context-parallel ranks that share a row.
        micro_batches: forward and backward passes of a rank in one call of its engine's schedule.
        accumulation: such calls in an optimizer step; for most systems one of these two numbers is 1.

    Returns:
        ``counts``: scope of the denominator. ``multiplies``, ``divides``: by the trainer, with numbers. ``engine``: its
        operations on gradients. ``factor``: gradient over exact gradient if every micro-batch has as many tokens;
        ``breaks``: invariants that it breaks.

    Raises:
        SpecError: a number below 1.
    """
    import pandas as pd

    given = {"dp": dp, "cp": cp, "micro_batches": micro_batches, "accumulation": accumulation}
    if min(given.values()) < 1:
        raise SpecError(
            "contract_table",
            found=", ".join(f"{name} = {size}" for name, size in given.items()),
            rule="ranks and passes are at least 1",
            fix="correct the number",
        )
    passes = micro_batches * accumulation
    sizes = {"dp": dp, "cp": cp, "dp_cp": dp * cp, "micro_batches": passes}

    def factors(names: tuple[str, ...]) -> str:
        return " x ".join(f"{name} ({sizes[name]})" for name in names)

    lines = []
    for system in SYSTEMS:
        for mode, scaling in load_system(system).scaling.items():
            factor = scaling_factor(scaling, dp=dp, cp=cp, micro_batches=passes)
            parts = {"step": 1, "pass": passes, "micro_batch": dp * passes}[scaling.counts]
            lines.append(
                {
                    "system": system,
                    "mode": mode,
                    "sums": "whole rows on every cp rank" if scaling.replicated else "its own tokens",
                    "counts": scaling.counts.replace("_", "-"),
                    "multiplies": factors(scaling.multiplied_by),
                    "divides": factors(scaling.divided_by),
                    "engine": _engine(scaling, factors),
                    "factor": factor * parts,
                    "breaks": ", ".join(scaling.breaks),
                }
            )
    return pd.DataFrame(lines).set_index(["system", "mode"])


def _engine(scaling: ScalingSpec, factors: Callable[[tuple[str, ...]], str]) -> str:
    above, below = factors(scaling.engine_multiplies), factors(scaling.engine_divides)
    return ", ".join(filter(None, ["sum", above and f"times {above}", below and f"over {below}"]))
