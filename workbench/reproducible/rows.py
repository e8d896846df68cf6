"""Whole rows: redundant computation on every rank of a row, and sums over rows in a fixed order.

Losses and metrics sum over tokens. On the whole row, in the order of the row, these sums are bitwise the same on every
rank that shares it, for any distribution of blocks; and a row has the same bits in every layout. Then only a few
numbers per row remain to be summed, in the order of the rows' indices, not of the ranks.

Letters: T tokens of a row | t tokens of a rank | R rows of a step | r rows of a rank | K numbers of a row.
"""

from __future__ import annotations

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

    Args:
        values_t: this rank's part.
        plan: shard plan of the row.
        axis: the ranks that share the row.
        device: of the result; None: that of this rank's part.

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

    Args:
        lines_rK: [r, K] float64 values of each row of this rank; every rank of the axis has the same number of rows.
        numbers_r: [r] the index of each row in the step, on the device of the axis.
        axis: axis whose ranks hold different rows (dp).

    Shapes: [r, K] -> [R, K].
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
