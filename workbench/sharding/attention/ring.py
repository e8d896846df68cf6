"""Ring attention: keys and values rotate around the ring, each rank's queries attend to them block by block.

At step i, rank r has the keys and values of rank r - i, and sends them on before it computes with them. In backward
their gradients rotate behind them, and from the last rank go back to their owner, summed over all ranks. The ring ends
at the farthest rank that sees anything: where documents are whole or adjacent, after one hop or none. A fully masked
block is not computed, but communication is the same on every rank.

Letters: R ranks | t tokens of a rank | d head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.attention.gathered import pack_key_value, unpack_key_value
from workbench.sharding.attention.kernels import choose
from workbench.sharding.attention.shard import AttentionShard, Block
from workbench.sharding.attention.sinks import kept, through_sinks
from workbench.sharding.collectives import start_rotation
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
        out = lse = query.new_empty(0)
        for step, (block, block_key, block_value) in enumerate(_rotation(key, value, shard, window, ctx.caller)):
            if block.is_empty:
                continue
            kernel = choose(shard.kernel, query, block_key, block)
            block_out, block_lse = kernel.forward(query, block_key, block_value, block, scale)
            block_out, block_lse = block_out.to(wide), block_lse.double()  # rounded once, at the end
            out, lse = merge(out, lse, block_out, block_lse) if step else (block_out, block_lse)
        out = out if sinks_H is None else out * kept(lse, sinks_H)
        out, lse = out.to(query.dtype), lse.to(wide)
        ctx.save_for_backward(query, key, value, out, lse, sinks_H)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks_H = ctx.saved_tensors
        d_sinks_H = None
        if sinks_H is not None:
            d_out, d_sinks_H = through_sinks(d_out, out, lse, sinks_H)
        axis: Axis = ctx.shard.outer
        wide = torch.promote_types(query.dtype, torch.float32)
        delta = (d_out.to(wide) * out).sum(-1)
        d_query = torch.zeros_like(query, dtype=wide)
        arrive: Callable[[], Tensor] | None = None
        hops = ctx.shard.outer_hops
        rotation = _rotation(key, value, ctx.shard, ctx.window, ctx.caller)
        for step, (block, block_key, block_value) in enumerate(rotation):
            d_kv = None
            if not block.is_empty:
                kernel = choose(ctx.shard.kernel, query, block_key, block)
                d_block_query, d_key, d_value = kernel.backward(
                    d_out, query, block_key, block_value, out, lse, block, ctx.scale, delta
                )
                d_query += d_block_query
                d_kv = pack_key_value(d_key, d_value, wide)
            if arrive is not None:  # gradients of the same keys and values, accumulated by the previous ranks
                accumulated = arrive()
                d_kv = accumulated if d_kv is None else d_kv.add_(accumulated)
            assert d_kv is not None, "each rank begins with its own keys, and sees them"
            if hops:
                places = 1 if step < hops else axis.size - hops  # from the last rank to the owner
                arrive = start_rotation(d_kv, axis, places=places, caller=ctx.caller)
            else:
                arrive = functools.partial(_own, d_kv)
        assert arrive is not None, "a rotation has at least one step"
        d_key, d_value = unpack_key_value(arrive())
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None, d_sinks_H


def _own(d_kv: Tensor) -> Tensor:
    """Gradients that no other rank adds to."""
    return d_kv


def _rotation(
    key: Tensor, value: Tensor, shard: AttentionShard, window: int | None, caller: str | None
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Keys and values of each rank in turn, this rank's first; the next ones are in flight while these are used."""
    axis = shard.outer
    both = pack_key_value(key, value)
    for step in range(shard.outer_hops + 1):
        arrive = start_rotation(both, axis, caller=caller) if step < shard.outer_hops else None
        yield shard.block((axis.rank - step) % axis.size, window=window), *unpack_key_value(both)
        if arrive is not None:
            both = arrive()
