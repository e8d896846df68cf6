"""Scaling contracts: factors that a trainer and its engine apply to a loss between a token sum and the optimizer.

Every trainer divides a sum over tokens by a count, multiplies and divides the loss of a micro-batch by sizes of its
layout, and hands the gradient to an engine that adds or averages over ranks and micro-batches. Written as data
(`workbench.specs.losses.ScalingSpec`), the product of all of it is one factor for each token. The workbench itself adds
over ranks and micro-batches and does nothing else, so a right contract has the factor 1 next to a count of the whole
step, and a wrong one shows its factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import SpecError
from workbench.specs.losses import ScalingSpec


@dataclass(frozen=True)
class StepLayout:
    """Split of a step into ranks.

    Attributes:
        dp: data-parallel ranks.
        cp: context-parallel ranks that share a row.
    """

    dp: int = 1
    cp: int = 1

    def micro_batches(self, rows: int) -> int:
        """Number of rows that each dp rank trains on, one after another, before it steps.

        Raises:
            SpecError: the rows do not divide evenly over the ranks.
        """
        if rows % self.dp:
            raise SpecError(
                f"{rows} rows on {self.dp} data-parallel ranks",
                rule="each rank takes the same number of rows",
                fix="pack the step into a multiple of dp rows",
            )
        return rows // self.dp

    def counted_together(self, rows: int, counts: str) -> list[range]:
        """Rows that share one count: all of the step, those of one pass of all dp ranks, or each its own."""
        stride = {"step": 1, "pass": self.micro_batches(rows), "micro_batch": rows}[counts]
        return [range(start, rows, stride) for start in range(stride)]


def scaling_factor(scaling: ScalingSpec, *, dp: int, cp: int, micro_batches: int, engine: bool = True) -> float:
    """Factor of a token's gradient, in addition to its weight, from the trainer and its engine.

    Formula:  multiplied_by * engine_multiplies * (cp if replicated) / (divided_by * engine_divides), each name its size

    Args:
        scaling: the contract.
        dp: data-parallel ranks.
        cp: context-parallel ranks that share a row.
        micro_batches: of a rank in an optimizer step.
        engine: include the engine's part; without it this is the factor in the trainer's returned loss.
    """
    sizes = {"dp": dp, "cp": cp, "dp_cp": dp * cp, "micro_batches": micro_batches}

    def product(names: Sequence[str]) -> int:
        total = 1
        for name in names:
            total *= sizes[name]
        return total

    trainer = product(scaling.multiplied_by) / product(scaling.divided_by)
    if not engine:
        return trainer
    gathered = cp if scaling.replicated else 1
    return trainer * gathered * product(scaling.engine_multiplies) / product(scaling.engine_divides)
