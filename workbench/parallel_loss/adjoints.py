"""Adjoints between local and global values, for engines that sum gradients and for engines that average them.

A value is *local* (this rank's tokens) or *global* (the same on every rank). The engine's gradient reduction after
backward determines the gradient of a local value: with c = 1 if it sums over the N ranks and c = N if it averages,

    gradient of a global value = dL/dx, the same on every rank        gradient of a local value = c dL/dx

so c is multiplied in where a gradient goes from a global value to local ones and divided out on the way back, once on
every path, however often a loss crosses between the two.

    crossing           forward         backward                       equivalent
    local -> global    all-reduce sum  times c, no collective         c = 1: all-reduce with identity backward
                                                                      c = N: all-reduce with all-reduce backward
    global -> local    identity        all-reduce sum, divided by c   c = 1: identity with all-reduce backward
    local -> local     all-reduce sum  all-reduce sum                 a document's sum, back on its tokens

Mixing up the two cases of the first line is wrong by a factor of N: all-reduce backward under an engine that sums is
N times too large, identity backward under one that averages is N times too small.

In the workbench each rank back-propagates the plain sum over its own tokens, and gradients are *summed* over dp x cp.
DDP and FSDP2 average by default, so there the loss is multiplied by the number of ranks: `engine_factor`.

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


def local_to_global(local: Tensor, axes: Sequence[Axis], factor: float) -> Tensor:
    """Sum local parts over ranks into a global value.

    Args:
        local: this rank's part.
        axes: the axes to sum over, one after another.
        factor: c: 1 if the engine sums gradients over these ranks, their number if it averages.

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
