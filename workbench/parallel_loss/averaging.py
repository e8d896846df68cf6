"""A loss for an engine that averages gradients.

Here each rank back-propagates the plain sum over its own tokens, and gradients are *summed* over dp x cp. DDP and
FSDP2 average unless told otherwise: their gradient is the sum divided by the ranks that they average over, and a loss
times that many ranks makes up for it.
"""

from __future__ import annotations

from typing import Literal

from workbench.errors import SpecError
from workbench.sharding.mesh import Mesh


class EngineFactor(float):
    """What a loss is multiplied by before backward, with the reason; otherwise a float.

    Attributes:
        why: the reason, in words.
    """

    why: str

    def __new__(cls, value: float, why: str) -> EngineFactor:
        """A factor and its reason."""
        factor = super().__new__(cls, value)
        factor.why = why
        return factor

    def __repr__(self) -> str:
        return f"loss * {float(self):g}: {self.why}"


def engine_factor(mesh: Mesh, reduction: Literal["sum", "mean"]) -> EngineFactor:
    """What a loss is multiplied by so that the gradient of an engine over dp x cp is the sum over its ranks.

    The engine must span dp and cp; one that spans dp only leaves cp ranks with different weights. tp ranks compute the
    same loss and are no part of it.

    Formula:  mean over R ranks of the gradient of R * loss_r = sum over ranks of the gradient of loss_r, R = dp * cp.

    Args:
        mesh: the axes.
        reduction: what the engine does to gradients. "mean": DDP, FSDP2 by default. "sum": FSDP2 with a gradient divide
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
        f"engine_factor: reduction = {reduction!r}", rule="sum or mean", fix="say what the engine does to gradients"
    )
