"""Ulysses and hybrid attention: an all-to-all exchanges tokens for heads; a rank computes rows for some of the heads.

The heads limit the number of Ulysses ranks, and a ring takes as many steps as it has ranks. Hybrid attention has both:
with U neighbours on cp = U * G ranks a ring has G steps, and only U must divide the heads.

Letters: R inner ranks | t tokens of a rank | s = R * t tokens | h heads of a rank afterwards | d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.attention import gathered, ring
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.collectives import exchange
from workbench.sharding.divisibility import check_dealt_heads
from workbench.sharding.mesh import Axis


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: AttentionShard,
    window: int | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Exchange tokens for heads over the inner axis; attend, for this rank's heads, over the outer axis.

    The outer axis has one rank (ulysses), or is a ring (hybrid).

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d], sinks [Hq] -> [1, Hq, t, d].
    Backward: the exchange is its own adjoint: two collectives forward, two backward; between them that of the ring.
              Of the sinks a rank has the gradient of its heads from the tokens of all inner ranks.
    Raises:   ShardingError: heads that cannot be dealt to the inner ranks.
    Source:   DeepSpeed-Ulysses, arXiv 2309.14509; hybrid: USP, arXiv 2405.07719; LoongTrain's 2D attention, arXiv
              2406.18485.
    """
    outer = ring if shard.algorithm == "hybrid" else gathered
    if shard.inner.size == 1:
        return outer.attend(query, key, value, shard, window, scale, sinks_H)
    copies = check_heads(query.shape[1], key.shape[1], shard.inner)
    if copies > 1:
        key, value = repeat_heads(key, copies), repeat_heads(value, copies)
    # [1, Hq, t, d], [1, Hk, t, d] twice -> [1, Hq / R, s, d], [1, max(Hk / R, 1), s, d] twice, in one collective
    query, key, value = _Trade.apply(shard, query, key, value)
    own_H = None if sinks_H is None else sinks_H.chunk(shard.inner.size)[shard.inner.rank]
    return _TradeBack.apply(shard, outer.attend(query, key, value, shard, window, scale, own_H))


def repeat_heads(heads: Tensor, copies: int) -> Tensor:
    """Repeat each head ``copies`` times, copies adjacent. Backward: the sum over the copies."""
    return heads.repeat_interleave(copies, dim=1)


def check_heads(queries: int, keys: int, axis: Axis) -> int:
    """Return how often each key head must be repeated so that the ranks divide the heads.

    Raises:
        ShardingError: query heads that the ranks do not divide, or key heads that neither divide the ranks nor are
            divided by them.
    """
    return check_dealt_heads(queries, keys, axis.size, axis.name)


class _Trade(Function):
    @staticmethod
    def forward(ctx: Any, shard: AttentionShard, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.shard, ctx.caller = shard, flight.caller()
        return _traded(parts, shard, ctx.caller)

    @staticmethod
    def backward(ctx: Any, *d_parts: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_traded_back(d_parts, ctx.shard, ctx.caller)


class _TradeBack(Function):
    @staticmethod
    def forward(ctx: Any, shard: AttentionShard, part: Tensor) -> Tensor:
        ctx.shard, ctx.caller = shard, flight.caller()
        return _traded_back([part], shard, ctx.caller)[0]

    @staticmethod
    def backward(ctx: Any, d_part: Tensor) -> tuple[None, Tensor]:
        return None, _traded([d_part], ctx.shard, ctx.caller)[0]


def _traded(parts: Sequence[Tensor], shard: AttentionShard, caller: str | None) -> tuple[Tensor, ...]:
    """[1, R * h, t, d] -> [1, h, s, d] each, tokens in the order of the row; all parts in one collective."""
    dealt_Rthd = [part[0].unflatten(0, (shard.inner.size, -1)).transpose(1, 2) for part in parts]
    rows_shd = exchange(torch.cat(dealt_Rthd, dim=2), shard.inner, caller=caller).flatten(0, 1)
    order_s = shard.row_order_on(rows_shd.device)
    rows_shd = rows_shd if order_s is None else rows_shd.index_select(0, order_s)
    return tuple(part.transpose(0, 1)[None] for part in rows_shd.split([d.shape[2] for d in dealt_Rthd], dim=1))


def _traded_back(parts: Sequence[Tensor], shard: AttentionShard, caller: str | None) -> tuple[Tensor, ...]:
    """[1, h, s, d] -> [1, R * h, t, d] each, tokens in each rank's own order; all parts in one collective."""
    rows_shd = torch.cat([part[0].transpose(0, 1) for part in parts], dim=1)
    order_s = shard.row_order_on(rows_shd.device, back=True)
    rows_shd = rows_shd if order_s is None else rows_shd.index_select(0, order_s)
    pieces_Rthd = exchange(rows_shd.unflatten(0, (shard.inner.size, -1)), shard.inner, caller=caller)
    return tuple(
        part.transpose(0, 1).flatten(1, 2).transpose(0, 1)[None]
        for part in pieces_Rthd.split([part.shape[1] for part in parts], dim=2)
    )
