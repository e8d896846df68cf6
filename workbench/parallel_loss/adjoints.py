"""Adjoints between local and global values, for engines that sum gradients and for engines that average them.

A value is *local* (this rank's tokens) or *global* (the same on every rank). The engine's gradient reduction after
backward determines the gradient of a local value: with c = 1 if it sums over the N ranks and c = N if it averages,

    gradient of a global value = dL/dx, the same on every rank        gradient of a local value = c dL/dx

so c is multiplied in where a gradient goes from a global value to local ones and divided out on the way back, once on
every path. The README of this package has the table of crossings, and what each wrong pair of collectives costs.

Source: the adjoints of Megatron-LM, arXiv 1909.08053, section 3 (f and g).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor
from torch.autograd import Function

from workbench.errors import SpecError
from workbench.sharding.collectives import identity_sum, sum_identity
from workbench.sharding.mesh import Axis, Mesh


class EngineFactor(float):
    """A float that multiplies the loss before backward, with the reason for it."""

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
    same loss and do not count. "mean" is the reduction of DDP, and of FSDP2 by default; "sum" that of FSDP2 with a
    gradient divide factor of 1, and of `workbench.sharding.gradients`.

    Formula:  mean over R ranks of the gradient of R * loss_r = sum over ranks of the gradient of loss_r, R = dp * cp.
    Raises:   SpecError: another reduction.
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


def local_to_global(local: Tensor, axes: Sequence[Axis], factor: float) -> Tensor:
    """Sum local parts over ranks into a global value; ``factor`` is c.

    Backward: the gradient times c, without a collective: the incoming gradient is the same on all ranks.
    """
    whole = local
    for axis in axes:
        whole = sum_identity(whole, axis)
    return whole if factor == 1 else _GradientTimes.apply(whole, factor, 1)


def global_to_local(whole: Tensor, axes: Sequence[Axis], factor: float) -> Tensor:
    """Use a global value in computations on this rank's tokens, which differ from those of other ranks.

    Backward: all-reduce sum of the gradients from all ranks' tokens, divided by c.
    """
    if factor != 1:
        whole = _GradientTimes.apply(whole, 1, factor)
    for axis in axes:
        whole = identity_sum(whole, axis)
    return whole


class _GradientTimes(Function):
    """Identity whose gradient is rescaled."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, times: float, over: float) -> Tensor:
        ctx.times, ctx.over = times, over
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.times / ctx.over, None, None
