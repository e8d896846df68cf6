"""Sums of floating-point numbers in an order that no layout changes: over rows, halves of a width, pairs of pieces.

Losses and metrics sum over tokens. On the whole row, computed redundantly on every rank of it in the order of the row,
these sums are bitwise the same on each rank, for any distribution of blocks; and a row has the same bits in every
layout. Then only a few numbers per row remain to be summed, in the order of the rows' indices, not of the ranks.

Letters: T tokens of a row | t tokens of a rank | R rows of a step | r rows of a rank | K numbers of a row | D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.collectives import gather_equal
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan


def whole_row(values_t: Tensor, plan: ShardPlan, axis: Axis, device: torch.device | str | None = None) -> Tensor:
    """Gather a row from all its ranks, in the order of the row; every rank must then compute the *same* with it.

    ``axis`` are the ranks that share the row; the result is on the device of this rank's part unless one is given.

    Shapes:   [t, ...] -> [T, ...].
    Layout:   cp: sharded(T) -> replicated.
    Backward: this rank's tokens of the gradient, which is already complete on every rank. No reduction.
    """
    return _WholeRow.apply(values_t, plan, axis, device)


class _WholeRow(Function):
    @staticmethod
    def forward(ctx: Any, values_t: Tensor, plan: ShardPlan, axis: Axis, device: torch.device | str | None) -> Tensor:
        ctx.plan, ctx.rank, ctx.device = plan, axis.rank, values_t.device
        rank_major_T = gather_equal(values_t, axis, caller=flight.caller()).flatten(0, 1)
        return plan.merge(rank_major_T.to(values_t.device if device is None else device))

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.plan.split(gradient_T, ctx.rank).to(ctx.device), None, None, None


def rows_in_order(lines_rK: Tensor, numbers_r: Tensor, axis: Axis) -> Tensor:
    """Gather the values of all rows of a step, in the order of the rows' indices; the same on every rank.

    Every rank of the axis (dp) has the same number of rows; their indices in the step are on the device of the axis.

    Shapes: [r, K] float64, [r] -> [R, K].
    """
    numbered_rK = torch.cat([numbers_r[:, None].double(), lines_rK.detach().to(numbers_r.device)], dim=1)
    numbered_RK = gather_equal(numbered_rK, axis).flatten(0, 1).to(lines_rK.device)
    return numbered_RK[numbered_RK[:, 0].argsort(stable=True), 1:]


def sum_in_order(lines_rK: Tensor, numbers_r: Tensor, axis: Axis) -> Tensor:
    """Sum over all rows of a step, sequentially in the order of their indices; see `rows_in_order`.

    A row of zeros changes no bit, so the index of an empty row of a rank without documents does not matter.

    Shapes: [r, K] -> [K].
    """
    total_K = lines_rK.new_zeros(lines_rK.shape[1])
    for line_K in rows_in_order(lines_rK, numbers_r, axis):
        total_K = total_K + line_K
    return total_K


def sum_by_pairs(pieces: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums, until one is left; the number of pieces is a power of two."""
    pieces = list(pieces)
    while len(pieces) > 1:
        pieces = [left + right for left, right in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def sum_over_pieces(pieces: Sequence[Tensor], axis: Axis) -> Tensor:
    """`sum_by_pairs` over the pieces of all tp ranks, in rank order: each rank sums the lower levels of the tree.

    Layout: tp: sharded(pieces) in, replicated out. One all-gather.
    """
    return sum_by_pairs(gather_equal(sum_by_pairs(pieces), axis).unbind())


def mean_by_halves(values_D: Tensor) -> Tensor:
    """Mean over the last dimension, kept with size 1: elementwise sums of halves, so rows are independent."""
    count = width = values_D.shape[-1]
    while count > 1:
        half, odd = divmod(count, 2)
        rest = values_D[..., 2 * half : count]
        values_D = values_D[..., :half] + values_D[..., half : 2 * half]
        values_D, count = (torch.cat([values_D, rest], -1) if odd else values_D), half + odd
    return values_D / width
