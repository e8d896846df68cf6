"""Ring attention: keys and values go around, each rank's queries meet them block by block.

At step i, rank r has the keys and values of rank r - i, and sends them on before it computes with them. Outputs of
blocks are merged by their log-normalisers. In backward the gradients of keys and values go around behind them: after as
many hops as there are ranks they are back where they belong, with something from everybody.

A block in which nothing is seen is not computed, but what is sent is the same on every rank and in every order.

Letters: R ranks | t tokens of a rank | d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight
from workbench.sharding.attention.block import Block
from workbench.sharding.attention.kernels import choose
from workbench.sharding.attention.key_values import joined, parted
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.collectives import start_rotation
from workbench.sharding.mesh import Axis


def attend(
    query: Tensor, key: Tensor, value: Tensor, shard: AttentionShard, window: int | None, scale: float
) -> Tensor:
    """This rank's queries against the keys and values of all ranks of the outer axis, one rank's at a time.

    Shapes:   query [1, Hq, t, d], key and value [1, Hk, t, d] -> [1, Hq, t, d].
    Backward: keys and values go around again, R - 1 hops; their gradients behind them, R hops, in float32 or better.
    Source:   Ring Attention, arXiv 2310.01889; the merge, arXiv 2307.08691.
    """
    return _Ring.apply(query, key, value, shard, window, scale)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each.

    Formula:  lse = log(exp(lse_a) + exp(lse_b)); out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
    Shapes:   out [..., t, d], lse [..., t] nats; where neither saw anything out stays 0 and lse -inf.
    """
    both = torch.logaddexp(lse, other_lse)
    finite = both.masked_fill(both == -torch.inf, 0)
    weight, other_weight = ((one - finite).exp().to(out.dtype)[..., None] for one in (lse, other_lse))
    return out * weight + other * other_weight, both


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shard: AttentionShard, window: int | None, scale: float
    ) -> Tensor:
        ctx.caller, ctx.shard, ctx.window, ctx.scale = flight.caller(), shard, window, scale
        wide = torch.promote_types(query.dtype, torch.float32)
        out = lse = query.new_empty(0)
        for step, (block, its_key, its_value) in enumerate(_round(key, value, shard, window, ctx.caller)):
            if block.is_empty:
                continue
            kernel = choose(shard.kernel, query, its_key, block)
            its_out, its_lse = kernel.forward(query, its_key, its_value, block, scale)
            its_out, its_lse = its_out.to(wide), its_lse.double()  # rounded once, at the end
            out, lse = merge(out, lse, its_out, its_lse) if step else (its_out, its_lse)
        out, lse = out.to(query.dtype), lse.to(wide)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        axis: Axis = ctx.shard.outer
        wide = torch.promote_types(query.dtype, torch.float32)
        delta = (d_out.to(wide) * out).sum(-1)
        d_query = torch.zeros_like(query, dtype=wide)
        arrive: Callable[[], Tensor] | None = None
        for block, its_key, its_value in _round(key, value, ctx.shard, ctx.window, ctx.caller):
            found = None
            if not block.is_empty:
                kernel = choose(ctx.shard.kernel, query, its_key, block)
                more, d_key, d_value = kernel.backward(
                    d_out, query, its_key, its_value, out, lse, block, ctx.scale, delta
                )
                d_query += more
                found = joined(d_key, d_value, wide)
            if arrive is not None:  # what the ranks before this one found for the same keys
                so_far = arrive()
                found = so_far if found is None else found.add_(so_far)
            assert found is not None, "each rank begins with its own keys, and sees them"
            arrive = start_rotation(found, axis, caller=ctx.caller) if axis.group is not None else lambda own=found: own
        assert arrive is not None, "a round has at least one step"
        d_key, d_value = parted(arrive())
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


def _round(
    key: Tensor, value: Tensor, shard: AttentionShard, window: int | None, caller: str | None
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Every rank's keys and values in turn, this rank's first; the next ones travel while these are used."""
    axis = shard.outer
    held = joined(key, value)
    for step in range(axis.size):
        arrive = start_rotation(held, axis, caller=caller) if step + 1 < axis.size else None
        yield shard.block((axis.rank - step) % axis.size, window=window), *parted(held)
        if arrive is not None:
            held = arrive()
