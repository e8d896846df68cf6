"""All-gather attention: each rank's queries against the keys of all ranks.

Keys and values are packed into one tensor for communication, token-major: tensors of several ranks concatenate
contiguously, and a token-major kernel reads them in place. Decoders produce them in this order too. Those of the whole
row are in memory while a layer computes, and not saved.

Letters: t tokens of a rank | T of all ranks | h key heads | d head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.attention.kernels import choose
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.attention.sinks import kept, through_sinks
from workbench.sharding.collectives import gather_equal, scatter_sum
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
    """This rank's queries against the keys and values of all ranks of the outer axis.

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d], sinks [Hq] -> [1, Hq, t, d].
    Backward: keys and values are gathered again; their gradients are reduce-scattered in float32 or better. One
              collective forward, two backward.
    Source:   all-gather form of context parallelism, Llama 3 report, arXiv 2407.21783, section 3.3.2.
    """
    return _Gathered.apply(query, key, value, shard, window, scale, sinks_H)


class _Gathered(Function):
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
        ctx.caller, ctx.shard, ctx.scale = flight.caller(), shard, scale
        ctx.block = block = shard.block(window=window)
        all_keys, all_values = _all_keys_values(key, value, shard.outer, ctx.caller)
        ctx.kernel = choose(shard.kernel, query, all_keys, block)
        out, lse = ctx.kernel.forward(query, all_keys, all_values, block, scale)
        out = out if sinks_H is None else out * kept(lse, sinks_H)
        out, lse = out.to(query.dtype), lse.to(torch.promote_types(query.dtype, torch.float32))
        ctx.save_for_backward(query, key, value, out, lse, sinks_H)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks_H = ctx.saved_tensors
        d_sinks_H = None
        if sinks_H is not None:
            d_out, d_sinks_H = through_sinks(d_out, out, lse, sinks_H)
        axis: Axis = ctx.shard.outer
        all_keys, all_values = _all_keys_values(key, value, axis, ctx.caller)
        d_query, d_key, d_value = ctx.kernel.backward(
            d_out, query, all_keys, all_values, out, lse, ctx.block, ctx.scale
        )
        if axis.group is not None:
            both = pack_key_value(d_key, d_value, torch.promote_types(key.dtype, torch.float32))
            d_key, d_value = unpack_key_value(scatter_sum(both.unflatten(0, (axis.size, -1)), axis, caller=ctx.caller))
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None, d_sinks_H


def _all_keys_values(key: Tensor, value: Tensor, axis: Axis, caller: str | None) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all ranks in rank order, [1, Hk, T, d] each."""
    if axis.group is None:
        return key, value
    return unpack_key_value(gather_equal(pack_key_value(key, value), axis, caller=caller).flatten(0, 1))


def pack_key_value(key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack keys and values, or their gradients, into one tensor. [1, h, t, d] each -> [t, 2 h, d]."""
    _, heads, tokens, features = key.shape
    packed = key.new_empty(tokens, 2 * heads, features, dtype=dtype or key.dtype)
    packed[:, :heads].copy_(key[0].transpose(0, 1))
    packed[:, heads:].copy_(value[0].transpose(0, 1))
    return packed


def unpack_key_value(both: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack into views of keys and values. [t, 2 h, d] -> [1, h, t, d] each."""
    key, value = both.transpose(0, 1)[None].chunk(2, dim=1)
    return key, value
