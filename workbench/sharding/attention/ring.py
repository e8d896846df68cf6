"""Ring attention: keys and values rotate around the ring, each rank's queries attend to them block by block.

At step i, rank r has the keys and values of rank r - i, and sends them on before it computes with them. In backward
their gradients rotate behind them, and from the last rank go back to their owner, summed over all other ranks. Only
keys that another rank sees travel, and only as far as the farthest rank that sees any: where documents are whole or
adjacent, after one hop or none. Only queries that see a key of a block are computed with it, and only what several
blocks add to is kept wider than the inputs; communication is the same on every rank.

Letters: R ranks | t tokens of a rank | d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.attention.kernels import choose
from workbench.sharding.attention.packing import pack_key_value, unpack_key_value
from workbench.sharding.attention.shard import AttentionShard, Block
from workbench.sharding.attention.sinks import kept, through_sinks
from workbench.sharding.collectives import start_rotation


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: AttentionShard,
    window: int | None,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """This rank's queries against the keys and values of all ranks of the outer axis, one rank's at a time.

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d], sinks [Hq] -> [1, Hq, t, d].
    Backward: keys and values rotate again, at most R - 1 hops; their gradients behind them, and back, in float32 or
              better.
    Source:   Ring Attention, arXiv 2310.01889; the merge, arXiv 2307.08691.
    """
    return _Ring.apply(query, key, value, shard, window, scale, sinks_H)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention outputs over two disjoint sets of keys.

    Formula:  lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
    Shapes:   out [..., t, d], lse [..., t] nats; for queries that see no key in either, out is 0 and lse -inf.
    """
    merged_lse = torch.logaddexp(lse, other_lse)
    finite = merged_lse.masked_fill(merged_lse == -torch.inf, 0)
    weight, other_weight = ((part - finite).exp().to(out.dtype)[..., None] for part in (lse, other_lse))
    return out * weight + other * other_weight, merged_lse


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        shard: AttentionShard,
        window: int | None,
        scale: float,
        sinks_H: Tensor | None,
    ) -> Tensor:
        ctx.caller, ctx.shard, ctx.window, ctx.scale = flight.caller(), shard, window, scale
        wide = torch.promote_types(query.dtype, torch.float32)
        later = _seeing_others(shard, window)
        rotation = _rotation(key, value, shard, window, ctx.caller)
        _, block, own_key, own_value = next(rotation)  # what others need of them is on its way now
        out, lse = choose(shard.kernel, query, own_key, block).forward(query, own_key, own_value, block, scale)
        later_out, later_lse = out[:, :, later].to(wide), lse[:, :, later].double()  # rounded once, at the end
        for queries, block, block_key, block_value in rotation:
            if block.is_empty:
                continue
            part, rows = query[:, :, queries], _inside(queries, later)
            kernel = choose(shard.kernel, part, block_key, block)
            part_out, part_lse = kernel.forward(part, block_key, block_value, block, scale)
            merged = merge(later_out[:, :, rows], later_lse[:, :, rows], part_out.to(wide), part_lse.double())
            later_out[:, :, rows], later_lse[:, :, rows] = merged
        if sinks_H is not None:
            out, later_out = out * kept(lse.double(), sinks_H), later_out * kept(later_lse, sinks_H)
        out, lse = out.to(query.dtype), lse.to(wide)
        out[:, :, later], lse[:, :, later] = later_out, later_lse
        ctx.save_for_backward(query, key, value, out, lse, sinks_H)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks_H = ctx.saved_tensors
        d_sinks_H = None
        if sinks_H is not None:
            d_out, d_sinks_H = through_sinks(d_out, out, lse, sinks_H)
        shard: AttentionShard = ctx.shard
        axis, shared = shard.outer, shard.shared(ctx.window)
        wide, later = torch.promote_types(query.dtype, torch.float32), _seeing_others(shard, ctx.window)
        rotation = _rotation(key, value, shard, ctx.window, ctx.caller)
        _, block, own_key, own_value = next(rotation)
        kernel = choose(shard.kernel, query, own_key, block)
        d_query, d_key, d_value = kernel.backward(d_out, query, own_key, own_value, out, lse, block, ctx.scale)
        d_later = d_query[:, :, later].to(wide)
        arrive: Callable[[], Tensor] | None = None
        for step, (queries, block, block_key, block_value) in enumerate(rotation, start=1):
            d_kv = None
            if not block.is_empty:
                d_part, part, part_out, part_lse = (whole[:, :, queries] for whole in (d_out, query, out, lse))
                kernel = choose(shard.kernel, part, block_key, block)
                d_part_query, d_block_key, d_block_value = kernel.backward(
                    d_part, part, block_key, block_value, part_out, part_lse, block, ctx.scale
                )
                d_later[:, :, _inside(queries, later)] += d_part_query
                d_kv = pack_key_value(d_block_key, d_block_value, wide)
            if d_kv is None:
                d_kv = query.new_zeros(shared.count, 2 * key.shape[1], key.shape[3], dtype=wide)
            if arrive is not None:  # gradients of the same keys and values, accumulated by the previous ranks
                d_kv += arrive()
            places = 1 if step < shared.hops else axis.size - shared.hops  # from the last rank to the owner
            arrive = start_rotation(d_kv, axis, places=places, caller=ctx.caller)
        d_query = _with_rows(d_query.to(query.dtype), later, d_later)
        if arrive is not None:
            rows, of_others = shared.rows(axis.rank), unpack_key_value(arrive())
            d_key, d_value = (
                _with_rows(d_own.to(own.dtype), rows, d_own[:, :, rows].to(wide) + d_other)
                for own, d_own, d_other in zip((key, value), (d_key, d_value), of_others, strict=True)
            )
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None, None, d_sinks_H


def _seeing_others(shard: AttentionShard, window: int | None) -> slice:
    """Places of this rank's queries from the first to the last that see keys of another rank."""
    axis, hops = shard.outer, shard.shared(window).hops
    blocks = [shard.shared_block((axis.rank - step) % axis.size, window=window) for step in range(1, hops + 1)]
    seeing = [queries for queries, block in blocks if not block.is_empty]
    return slice(min(one.start for one in seeing), max(one.stop for one in seeing)) if seeing else slice(0, 0)


def _inside(rows: slice, outer: slice) -> slice:
    """The rows, counted from the first of ``outer``."""
    return slice(rows.start - outer.start, rows.stop - outer.start)


def _with_rows(whole: Tensor, rows: slice, values: Tensor) -> Tensor:
    """Replace some rows in place. [1, H, t, d]."""
    whole[:, :, rows] = values
    return whole


def _rotation(
    key: Tensor, value: Tensor, shard: AttentionShard, window: int | None, caller: str | None
) -> Iterator[tuple[slice, Block, Tensor, Tensor]]:
    """This rank's keys and values, then the shared ones of each rank before it; the next are in flight meanwhile.

    Yields the places of the queries that see any, the block, keys and values.
    """
    axis, shared = shard.outer, shard.shared(window)
    arrive = None
    if shared.hops:
        rows = shared.rows(axis.rank)
        arrive = start_rotation(pack_key_value(key[:, :, rows], value[:, :, rows]), axis, caller=caller)
    yield slice(None), shard.block(axis.rank, window=window), key, value
    for step in range(1, shared.hops + 1):
        assert arrive is not None, "it was started in the step before"
        both = arrive()
        arrive = start_rotation(both, axis, caller=caller) if step < shared.hops else None
        yield *shard.shared_block((axis.rank - step) % axis.size, window=window), *unpack_key_value(both)
