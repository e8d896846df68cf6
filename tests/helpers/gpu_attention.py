"""Packed rows of the size of a model's, for kernels on a GPU."""

from __future__ import annotations

import random

import torch

from tests.helpers.kernel_blocks import block
from workbench.sharding.plan import ShardPlan


def packed(tokens, *, least=1, most=4096, multiple_of=1, seed=0):
    """Lengths of documents that fill a row."""
    draw, lengths = random.Random(seed), []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, multiple_of * draw.randint(-(-least // multiple_of), most // multiple_of)))
    return lengths


def blocks_of(order, cp, lengths, *, at_once, window=None, block_tokens=128):
    """(places of the queries, places of the keys, block) for every rank and every block that it meets."""
    plan = ShardPlan.make(order, num_tokens=sum(lengths), cp=cp, document_lengths=lengths, block_tokens=block_tokens)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sources = [plan.permutation_T] if at_once else [plan.positions(rank) for rank in range(cp)]
    return [
        (plan.positions(rank), keys, block(plan.positions(rank), keys, documents, window))
        for rank in range(cp)
        for keys in sources
    ]


def heads(count, tokens, d=128, dtype=torch.bfloat16):
    """[1, count, tokens, d] on the GPU, one token after another in memory."""
    return torch.randn(1, tokens, count, d, device="cuda").to(dtype).transpose(1, 2)
