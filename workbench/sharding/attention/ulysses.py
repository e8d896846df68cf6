"""Ulysses and hybrid attention: an all-to-all exchanges tokens for heads; a rank computes rows for some of the heads.

The heads limit the number of Ulysses ranks, and a ring takes as many steps as it has ranks. Hybrid attention has both:
with U neighbours on cp = U * G ranks a ring has G steps, and only U must divide the heads.

With many tokens a rank computes its heads in two parts, as `gathered` does: the tokens of the second part travel while
the first is computed, and its output travels back during the second; a part is packed or unpacked while the other
travels. So do gradients: each exchange is two functions of autograd, of which the backward of the second starts what
that of the first waits for, and autograd takes the functions in the reverse order of their calls.

Letters: R inner ranks | P parts | t tokens of a rank | s = R * t tokens | h heads of a rank afterwards, or of a part of
them | d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.attention import gathered, ring
from workbench.sharding.attention.gathered import parts_of_heads
from workbench.sharding.attention.packing import empty_heads, pack_part, unpack_part
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.collectives import exchange, start_exchange
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
    Backward: the exchange is its own adjoint: two collectives forward and two backward for each part of the heads;
              between them those of the ring. Of the sinks a rank has the gradient of its heads from the tokens of all
              inner ranks.
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
    ranks, key_heads = shard.inner.size, key.shape[1] // shard.inner.size
    parts = parts_of_heads(key_heads, key.shape[2])
    sizes = [query.shape[1] // ranks // parts, key_heads // parts, key_heads // parts]
    caller = flight.caller()
    forth, back = ([_Exchange(shard, parts > 1, caller) for _ in range(parts)] for _ in range(2))
    sent = _Deal.apply(forth, query, key, value)
    sinks = [None] * parts if sinks_H is None else sinks_H.chunk(ranks)[shard.inner.rank].chunk(parts)
    returned = []
    for there, again, part, sinks_h in zip(forth, back, sent, sinks, strict=True):
        in_row_order_shd = _Reorder.apply(shard, False, _Arrive.apply(there, part).flatten(0, 1))
        heads = [one.transpose(0, 1)[None] for one in in_row_order_shd.split(sizes, dim=1)]  # [1, h, s, d]
        out = outer.attend(*heads, shard, window, scale, sinks_h)
        by_rank_shd = _Reorder.apply(shard, True, out.squeeze(0).transpose(0, 1))
        returned.append(_Depart.apply(again, by_rank_shd.unflatten(0, (ranks, -1))))
    return _Collect.apply(back, query.shape[1], *returned)


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


@dataclass
class _Exchange:
    """One exchange over the inner axis, forward and then backward: one function of autograd starts it, another waits.

    Attributes:
        overlaps: it travels while other parts are computed; without them it is over when it has started.
        arrive: waits for what was started last.
    """

    shard: AttentionShard
    overlaps: bool
    caller: str | None
    arrive: Callable[[], Tensor] | None = None

    def depart(self, pieces_R: Tensor) -> Tensor:
        """Start; return a placeholder of the shape of what arrives, without memory."""
        assert self.arrive is None, "one exchange at a time"
        if self.overlaps:
            self.arrive = start_exchange(pieces_R, self.shard.inner, caller=self.caller)
        else:
            received_R = exchange(pieces_R, self.shard.inner, caller=self.caller)
            self.arrive = lambda: received_R
        searched = torch.is_anomaly_enabled()  # for NaN, in every gradient
        return (pieces_R.new_zeros(()) if searched else pieces_R.new_empty(())).expand(pieces_R.shape)

    def wait(self) -> Tensor:
        """Return what has arrived."""
        assert self.arrive is not None, "an exchange starts first"
        arrive, self.arrive = self.arrive, None
        return arrive()


class _Depart(Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, pieces_R: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.depart(pieces_R)

    @staticmethod
    def backward(ctx: Any, placeholder_R: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.wait()


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, placeholder_R: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    def backward(ctx: Any, d_pieces_R: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.depart(d_pieces_R)


class _Deal(Function):
    """Deal heads to the inner ranks, and start the exchange of each part: P placeholders. [1, H, t, d] each."""

    @staticmethod
    def forward(ctx: Any, exchanges: Sequence[_Exchange], *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.exchanges, ctx.heads, ctx.tokens = exchanges, [one.shape[1] for one in heads], heads[0].shape[2]
        ranks, parts = exchanges[0].shard.inner.size, len(exchanges)
        return tuple(there.depart(pack_part(heads, number, ranks, parts)) for number, there in enumerate(exchanges))

    @staticmethod
    def backward(ctx: Any, *placeholders_R: Tensor) -> tuple[Tensor | None, ...]:
        d_heads = [empty_heads(placeholders_R[0], count, ctx.tokens) for count in ctx.heads]
        for number, there in reversed(list(enumerate(ctx.exchanges))):  # in the order of their departures
            unpack_part(there.wait(), d_heads, number, len(ctx.exchanges))
        return None, *d_heads


class _Collect(Function):
    """Wait for the output of each part, and put the heads of all inner ranks together: [1, H, t, d]."""

    @staticmethod
    def forward(ctx: Any, exchanges: Sequence[_Exchange], heads: int, *placeholders_R: Tensor) -> Tensor:
        ctx.exchanges = exchanges
        out = empty_heads(placeholders_R[0], heads, placeholders_R[0].shape[1])
        for number, back in enumerate(exchanges):
            unpack_part(back.wait(), [out], number, len(exchanges))
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        exchanges, ranks = ctx.exchanges, ctx.exchanges[0].shard.inner.size
        departed = [
            back.depart(pack_part([d_out], number, ranks, len(exchanges)))
            for number, back in reversed(list(enumerate(exchanges)))  # the last is computed first
        ]
        return None, None, *departed  # placeholders, of which one is like another


class _Reorder(Function):
    """Tokens of all inner ranks, from the order of ranks to that of the row, or ``back``. Backward: the other way."""

    @staticmethod
    def forward(ctx: Any, shard: AttentionShard, back: bool, rows_s: Tensor) -> Tensor:
        ctx.shard, ctx.back = shard, back
        return _reordered(rows_s, shard, back)

    @staticmethod
    def backward(ctx: Any, d_rows_s: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _reordered(d_rows_s, ctx.shard, not ctx.back)


def _reordered(rows_s: Tensor, shard: AttentionShard, back: bool) -> Tensor:
    order_s = shard.row_order_on(rows_s.device, back=back)
    return rows_s.view_as(rows_s) if order_s is None else rows_s.index_select(0, order_s)
