"""The two borders that a gradient crosses, for engines that add gradients up and for those that average them.

A number is *local* (this rank's tokens) or *whole* (the same on every rank). What an engine does to gradients after
backward decides what a local value's gradient must be: with c = 1 where it adds up over the N ranks and c = N where it
averages,

    gradient of a whole number = dL/dx, the same on every rank        gradient of a local value = c dL/dx

so c enters where a gradient goes from a whole number to local values and leaves on the way back, once on every path,
however often a loss crosses the border.

    border            forward         backward                       what it is elsewhere
    local -> whole    all-reduce sum  times c, no collective         c = 1: all-reduce with identity backward
                                                                     c = N: all-reduce with all-reduce backward
    whole -> local    identity        all-reduce sum, divided by c   c = 1: identity with all-reduce backward
    local -> local    all-reduce sum  all-reduce sum                 a document's sum, back on its tokens

The pairs of the first line that do not belong together are wrong by N: all-reduce backward under an engine that adds up
is N times too large, identity backward under one that averages is N times too small.

Source: the adjoints of Megatron-LM, arXiv 1909.08053, section 3 (f and g).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from workbench.sharding.collectives import identity_sum, sum_identity
from workbench.sharding.mesh import Axis


def local_to_whole(local: Tensor, axes: Sequence[Axis], factor: float) -> Tensor:
    """Add up what the ranks hold; every rank then goes on with the same number.

    Args:
        local: this rank's part.
        axes: what it is added up over, one after another.
        factor: c, 1 where the engine adds gradients up over these ranks, their number where it averages.

    Backward: the gradient times c, without a collective: what arrives is the same on all ranks.
    """
    whole = local
    for axis in axes:
        whole = sum_identity(whole, axis)
    return whole if factor == 1 else _GradientTimes.apply(whole, factor, 1)


def whole_to_local(whole: Tensor, axes: Sequence[Axis], factor: float) -> Tensor:
    """Hand a whole number to computations on this rank's tokens, which differ from those of other ranks.

    Backward: all-reduce sum of what all ranks' tokens want from it, divided by c.
    """
    if factor != 1:
        whole = _GradientTimes.apply(whole, 1, factor)
    for axis in axes:
        whole = identity_sum(whole, axis)
    return whole


class _GradientTimes(Function):
    """The same number, whose gradient is another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, times: float, over: float) -> Tensor:
        ctx.times, ctx.over = times, over
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.times / ctx.over, None, None
