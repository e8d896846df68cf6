"""A row of `attention_case` by a kernel alone: every rank's queries against blocks of keys, put together here."""

from __future__ import annotations

import torch

from tests.helpers.attention_case import SCALE, STRETCHES, plan, tensors
from workbench.sharding.attention.shard import Block


def block(queries, keys, documents, window=None):
    """A block of positions in a row with numbered documents."""
    queries, keys, documents = (torch.as_tensor(x) for x in (queries, keys, documents))
    return Block(queries, keys, documents[queries], documents[keys], window)


def by_blocks(kernel, order, cp, heads, window=None, *, at_once):
    """Output and gradients [heads, T, D] in the order of the row.

    With ``at_once`` each rank meets all keys in one block, in rank order; else those of one rank at a time, and what
    the blocks say is merged by their log-normalisers. Gradients are of the whole softmax, and added up.
    """
    lay = plan(order, cp)
    query, key, value, d_out = (x[None] for x in tensors(*heads))
    out, d_query, d_key, d_value = (torch.full_like(x, 0) for x in (query, query, key, value))
    sources = [lay.permutation_T] if at_once else [lay.positions(rank) for rank in range(cp)]
    for rank in range(cp):
        own = lay.positions(rank)
        blocks = [(keys, block(own, keys, STRETCHES, window)) for keys in sources]
        results = [
            kernel.forward(query[:, :, own], key[:, :, keys], value[:, :, keys], its, SCALE) for keys, its in blocks
        ]
        lse = torch.stack([its_lse for _, its_lse in results]).double().logsumexp(0)
        merged = sum(its_out.double() * (its_lse - lse).exp()[..., None] for its_out, its_lse in results)
        out[:, :, own] = merged
        for keys, its in blocks:
            gradients = kernel.backward(
                d_out[:, :, own], query[:, :, own], key[:, :, keys], value[:, :, keys], merged, lse, its, SCALE
            )
            for total, rows, gradient in zip((d_query, d_key, d_value), (own, keys, keys), gradients, strict=True):
                total[:, :, rows] += gradient
    return tuple(x[0] for x in (out, d_query, d_key, d_value))
