"""One row, its queries, keys and values: attention by ranks that are threads, and by the oracle."""

from __future__ import annotations

import functools
from itertools import groupby

import torch

from tests.helpers.threads import axes, on_threads
from tests.oracles.attention import attention
from workbench.rollouts.batch import PADDING
from workbench.sharding.attention import sharded_attention
from workbench.sharding.attention.shard import AttentionShard
from workbench.sharding.plan import ShardPlan

ORDERS = ("contiguous", "zigzag", "striped", "document_zigzag", "whole_documents", "balanced")
LENGTHS = (8, 16, 8, 16)
DOCUMENTS = [0] * 5 + [PADDING] * 3 + [1] * 16 + [2] + [PADDING] * 7 + [3] * 9 + [PADDING] * 7
"""Documents of 5, 16, 1 and 9 tokens, each padded to a multiple of 8."""
STRETCHES = [number for number, (_, run) in enumerate(groupby(DOCUMENTS)) for _ in run]
T, D, SCALE = len(DOCUMENTS), 6, 0.4


def plan(order, cp):
    return ShardPlan.make(order, num_tokens=T, cp=cp, document_lengths=LENGTHS, block_tokens=2)


@functools.cache
def tensors(queries, keys):
    """Query, key, value and the gradient of the output, [heads, T, D] each."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    return tuple(
        torch.randn(heads, T, D, dtype=torch.float64, generator=generator) for heads in (queries, keys, keys, queries)
    )


@functools.cache
def expected(heads, window=None):
    """The oracle's output and the gradients of query, key and value, [heads, T, D] each."""
    *leaves, d_out = (x.clone().requires_grad_() for x in tensors(*heads))
    out = attention(*leaves, STRETCHES, scale=SCALE, window=window)
    return (out.detach(), *torch.autograd.grad(out, leaves, d_out))


def by_ranks(order, cp, algorithm, heads, *, inner=1, window=None, dtype=torch.float64, kernel="plain"):
    """The same by ranks, put together in the order of the row."""
    lay, lines = plan(order, cp), axes(cp, inner)

    def rank(number):
        axis, cp_inner, cp_outer = lines[number]
        shard = AttentionShard.make(
            lay, torch.tensor(DOCUMENTS), axis, algorithm=algorithm, kernel=kernel, inner=cp_inner, outer=cp_outer
        )
        *leaves, d_out = (x[None, :, lay.positions(number)].to(dtype).requires_grad_() for x in tensors(*heads))
        out, _ = sharded_attention(None, *leaves, None, shard=shard, scaling=SCALE, sliding_window=window)
        return (out.detach().transpose(1, 2), *torch.autograd.grad(out, leaves, d_out.transpose(1, 2)))

    return tuple(
        lay.merge(torch.cat([x[0] for x in shares], dim=1).movedim(1, 0)).movedim(0, 1)
        for shares in zip(*on_threads(rank, cp), strict=True)
    )


def assert_right(found, heads, window=None, *, atol=1e-13):
    """Compare output and gradients with the oracle's."""
    for name, actual, right in zip(("output", "query", "key", "value"), found, expected(heads, window), strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
