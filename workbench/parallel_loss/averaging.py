"""Loss scaling for engines that average gradients.

Here each rank back-propagates the plain sum over its own tokens, and gradients are *summed* over dp x cp. DDP and
FSDP2 average by default: their gradient is the sum divided by the number of ranks, so the loss is multiplied by that
number.
"""

from __future__ import annotations

from typing import Literal

from workbench.errors import SpecError
from workbench.sharding.mesh import Mesh


class EngineFactor(float):
    """A float that multiplies the loss before backward, with the reason for it.

    Attributes:
        why: the reason, as text.
    """

    why: str

    def __new__(cls, value: float, why: str) -> EngineFactor:
        """Create a factor with its reason."""
        factor = super().__new__(cls, value)
        factor.why = why
        return factor

    def __repr__(self) -> str:
        return f"loss * {float(self):g}: {self.why}"


def engine_factor(mesh: Mesh, reduction: Literal["sum", "mean"]) -> EngineFactor:
    """Return the loss factor that makes the gradient of an engine over dp x cp the sum over its ranks.

    The engine must span dp and cp; one that spans dp only leaves cp ranks with different weights. tp ranks compute the
    same loss and do not count.

    Formula:  mean over R ranks of the gradient of R * loss_r = sum over ranks of the gradient of loss_r, R = dp * cp.

    Args:
        mesh: the axes.
        reduction: the engine's gradient reduction. "mean": DDP, FSDP2 by default. "sum": FSDP2 with a gradient divide
            factor of 1, or `workbench.sharding.gradients`.

    Raises:
        SpecError: another reduction.
    """
    dp, cp = mesh["dp"].size, mesh["cp"].size
    ranks = f"{dp * cp} rank{'s' if dp * cp > 1 else ''} (dp={dp} x cp={cp})"
    if reduction == "sum":
        return EngineFactor(1, f"gradients are summed over {ranks}")
    if reduction == "mean":
        return EngineFactor(dp * cp, f"gradients are averaged over {ranks}, and each back-propagates a part of a sum")
    raise SpecError(
        f"engine_factor: reduction = {reduction!r}", rule="sum or mean", fix="name the engine's gradient reduction"
    )
