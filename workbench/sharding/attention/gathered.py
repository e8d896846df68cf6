"""All-gather attention: each rank's queries against its own keys, and those of other ranks that any rank sees.

Keys and values are packed into one tensor for communication, token-major: tensors of several ranks concatenate
contiguously, and a token-major kernel reads them in place. Decoders produce them in this order too. Keys that no other
rank sees stay where they are; the others are in memory on every rank while a layer computes, and not saved. Where many
travel, the heads are computed in two parts: the keys of the second are on their way while the first is computed, and
the first's gradients during the second.

Letters: t tokens of a rank | T of all ranks | h key heads | d head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.attention.kernels import choose
from workbench.sharding.attention.packing import pack_key_value, unpack_key_value
from workbench.sharding.attention.shard import AttentionShard, Shared
from workbench.sharding.attention.sinks import kept, through_sinks
from workbench.sharding.collectives import start_gather, start_scatter_sum
from workbench.sharding.mesh import Axis

PARTS_FROM_TOKENS = 16384
"""Tokens that a rank sends from which heads are computed in two parts. Below, on H100 and H200 with 0.6 B parameters, a
step is bound by launches, and those of a second part cost more than it hides."""


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
              collective forward for each part of the heads, two backward; none where every document is on one rank.
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
        ctx.block = block = shard.gathered_block(window=window)
        ctx.shared = shard.shared(window)
        ctx.parts = parts = parts_of_heads(key.shape[1], ctx.shared.count)
        arrivals = _start_gathers(key, value, parts, ctx.shared, shard.outer, ctx.caller)
        outs, lses = [], []
        for part, arrive in zip(query.chunk(parts, 1), arrivals, strict=True):
            keys, values = arrive()
            ctx.kernel = choose(shard.kernel, part, keys, block)
            out, lse = ctx.kernel.forward(part, keys, values, block, scale)
            outs.append(out)
            lses.append(lse)
        out, lse = _joined(outs), torch.cat(lses, 1) if parts > 1 else lses[0]
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
        arrivals = _start_gathers(key, value, ctx.parts, ctx.shared, axis, ctx.caller)
        of_queries = zip(*(whole.chunk(ctx.parts, 1) for whole in (d_out, query, out, lse)), strict=True)
        d_queries, sums = [], []
        for (d_part, part, part_out, part_lse), arrive in zip(of_queries, arrivals, strict=True):
            d_query, d_key, d_value = ctx.kernel.backward(
                d_part, part, *arrive(), part_out, part_lse, ctx.block, ctx.scale
            )
            d_queries.append(d_query)
            sums.append(_start_sum(d_key, d_value, ctx.shared, axis, ctx.caller))
        d_keys, d_values = zip(*(arrive() for arrive in sums), strict=True)
        d_query, d_key, d_value = _joined(d_queries), _joined(d_keys), _joined(d_values)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None, d_sinks_H


def parts_of_heads(key_heads: int, tokens: int) -> int:
    """Parts in which a rank that sends so many tokens computes its heads, one after another; the same on every rank."""
    return 2 if tokens >= PARTS_FROM_TOKENS and key_heads % 2 == 0 else 1


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join the heads of all parts, token-major in memory, as kernels and decoders have them. [1, h, t, d] each."""
    return parts[0] if len(parts) == 1 else torch.cat([part.transpose(1, 2) for part in parts], 2).transpose(1, 2)


def _start_gathers(
    key: Tensor, value: Tensor, parts: int, shared: Shared, axis: Axis, caller: str | None
) -> list[Callable[[], tuple[Tensor, Tensor]]]:
    """Start to gather shared keys and values; for each part of the heads, what waits for [1, Hk, k, d] each.

    They are in the order of the ranks, this rank's own whole among them.
    """
    if not shared.count:
        return [lambda: (key, value)]
    packed = [pack_key_value(*pair) for pair in zip(key.chunk(parts, 1), value.chunk(parts, 1), strict=True)]
    starts = [start_gather(own[shared.rows(axis.rank)], axis, caller=caller) for own in packed]
    return [functools.partial(_arrived, own, arrive, axis) for own, arrive in zip(packed, starts, strict=True)]


def _arrived(own: Tensor, arrive: Callable[[], Tensor], axis: Axis) -> tuple[Tensor, Tensor]:
    gathered_R = arrive()
    if gathered_R.shape[1] == len(own):
        return unpack_key_value(gathered_R.flatten(0, 1))
    return unpack_key_value(torch.cat([*gathered_R[: axis.rank], own, *gathered_R[axis.rank + 1 :]]))


def _start_sum(
    d_key: Tensor, d_value: Tensor, shared: Shared, axis: Axis, caller: str | None
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start to sum gradients of shared keys and values over ranks; return what waits for those of this rank's keys."""
    if not shared.count:
        return lambda: (d_key, d_value)
    wide = torch.promote_types(d_key.dtype, torch.float32)
    before, after = axis.rank * shared.count, (axis.size - 1 - axis.rank) * shared.count
    own, rows = slice(before, d_key.shape[2] - after), shared.rows(axis.rank)
    sent = [slice(0, before), slice(before + rows.start, before + rows.stop), slice(own.stop, None)]
    if own.stop - own.start == shared.count:
        sent = [slice(None)]
    packed = [pack_key_value(d_key[:, :, one], d_value[:, :, one], wide) for one in sent]
    pieces = packed[0] if len(packed) == 1 else torch.cat(packed)
    arrive = start_scatter_sum(pieces.unflatten(0, (axis.size, -1)), axis, caller=caller)

    def summed() -> tuple[Tensor, Tensor]:
        d_own_key, d_own_value = d_key[:, :, own], d_value[:, :, own]
        d_own_key[:, :, rows], d_own_value[:, :, rows] = unpack_key_value(arrive())
        return d_own_key, d_own_value

    return summed
