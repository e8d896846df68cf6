"""Queries and keys of a span that form one call of FlashAttention."""

from __future__ import annotations

import torch

from workbench.reproducible.blocks import RowBlocks
from workbench.reproducible.kernels import flash
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan

DOCUMENTS = torch.tensor([0] * 5 + [1] * 3 + [2] * 16)
PLAN = ShardPlan.make("contiguous", num_tokens=24, cp=1, block_tokens=8, document_lengths=(5, 3, 16))
BLOCKS = RowBlocks.make(AttentionShard.make(PLAN, DOCUMENTS, Axis("cp")), 8)


def seen(cuts, window=None):
    """[queries, keys] bool, from cuts whose last query sees the last key."""
    result = torch.zeros(24, 24, dtype=torch.bool)
    for cut in cuts:
        for query in range(cut.query_start, cut.query_stop):
            last = cut.key_stop - (cut.query_stop - query)
            result[query, max(cut.key_start, last + 1 - (window or 24)) : last + 1] = True
    return result


def test_cuts_define_the_visible_keys():
    place = torch.arange(24)
    for window in (None, 3):
        cuts = [cut for span in BLOCKS.spans(window) for cut in flash.cuts_of(span)]
        right = (DOCUMENTS[:, None] == DOCUMENTS) & (place[:, None] >= place)
        if window:
            right &= place[:, None] - place < window
        assert torch.equal(seen(cuts, window), right)


def test_keys_of_one_block_follow_each_other_without_a_gap():
    for span in BLOCKS.spans(None):
        cuts = flash.cuts_of(span)
        assert [cut.key_start for cut in cuts] == [span.keys.start, *(cut.key_stop for cut in cuts[:-1])]
        assert cuts[-1].key_stop == span.keys.stop


def test_pieces_begin_where_the_call_does():
    span = BLOCKS.spans(None)[2]
    pieces = flash.Pieces.of(flash.cuts_of(span), torch.device("cpu"), query=span.queries.start, key=span.keys.start)
    assert pieces.query_starts.tolist() == [0, 8]
    assert pieces.key_starts.tolist() == [0, 16]
    assert pieces.key_lengths.tolist() == [16]
    assert (pieces.longest_query, pieces.longest_key) == (8, 16)
    every = flash.Pieces.of([cut for one in BLOCKS.spans(None) for cut in flash.cuts_of(one)], torch.device("cpu"))
    assert every.query_starts.tolist() == [0, 5, 8, 16, 24]
    assert every.key_starts.tolist() == [0, 5, 8, 8, 24]
    assert every.key_lengths.tolist() == [5, 3, 8, 16]


def test_unsupported_operands_are_reported():
    assert "on cpu" in flash.refusal(torch.bfloat16, torch.device("cpu"), 64)
    assert "float32" in flash.refusal(torch.float32, torch.device("cuda"), 64)
    assert "not 20" in flash.refusal(torch.bfloat16, torch.device("cuda"), 20)
    assert flash.refusal(torch.bfloat16, torch.device("cuda"), 128) is None
