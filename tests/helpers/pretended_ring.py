"""A CPU version of torch's `context_parallel`: shards buffers in place by head and tail, replaces attention.

Attention gathers keys and values and masks by positions; nothing of it is the workbench's. Like torch up to 2.11 it
does not clean up behind an exception.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn import functional

from workbench.sharding.torch_context_parallel import TorchRing


def head_and_tail(rank: int, ranks: int, length: int) -> list[int]:
    """Return the tokens of a rank, in its order."""
    chunk = length // (2 * ranks)
    return [*range(rank * chunk, (rank + 1) * chunk), *range(length - (rank + 1) * chunk, length - rank * chunk)]


class Gathered(torch.autograd.Function):
    """Return every rank's piece along dim 2; the gradients of all ranks for a piece are summed."""

    @staticmethod
    def forward(ctx, local, group):
        ctx.group = group
        pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, local.contiguous(), group=group)
        return torch.cat(pieces, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), dim=2)[dist.get_rank(ctx.group)], None


@contextmanager
def ring_on_cpu(mesh, *, buffers, buffer_seq_dims, no_restore_buffers):
    """Has the arguments of torch's."""
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    assert len(no_restore_buffers) == len(buffers) == len(buffer_seq_dims)
    length = buffers[0].shape[buffer_seq_dims[0]]
    order = torch.tensor([t for r in range(ranks) for t in head_and_tail(r, ranks, length)])
    local = order.view(ranks, -1)[rank]
    for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
        shard = buffer.index_select(dim, local)
        buffer.resize_(shard.shape)
        buffer.copy_(shard)
    plain = functional.scaled_dot_product_attention

    def attention(query, key, value, *, is_causal, scale, enable_gqa):
        assert is_causal
        assert not enable_gqa
        assert query.shape[1] == key.shape[1]
        key, value = Gathered.apply(key, group), Gathered.apply(value, group)
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        return scores.masked_fill(local[:, None] < order, -torch.inf).softmax(-1) @ value

    functional.scaled_dot_product_attention = attention
    yield
    functional.scaled_dot_product_attention = plain


RING = TorchRing(ring_on_cpu, __name__, ("cpu",))
