"""Rows as blocks: their ranks, the keys of each, and rows that do not split."""

import pytest
import torch

from workbench.errors import ShardingError
from workbench.reproducible.blocks import RowBlocks
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan
from workbench.sharding.simulated import simulate

DOCUMENTS = torch.tensor([0] * 5 + [1] * 8 + [-1] * 3)


def blocks_of(order, cp, block, axis=None, **how):
    plan = ShardPlan.make(order, num_tokens=16, cp=cp, document_lengths=(5, 8, 3), block_tokens=4)
    return RowBlocks.make(AttentionShard.make(plan, DOCUMENTS, axis or Axis("cp", cp), **how), block)


def test_a_block_looks_at_its_documents_from_their_beginning():
    spans = blocks_of("contiguous", 1, 4).spans(None)
    assert [(span.queries, span.keys) for span in spans] == [
        (slice(0, 4), slice(0, 4)),
        (slice(4, 8), slice(0, 8)),
        (slice(8, 12), slice(5, 12)),
        (slice(12, 16), slice(5, 16)),
    ]
    whole = DOCUMENTS[:, None].eq(DOCUMENTS).tril()
    for span in spans:
        assert torch.equal(span.seen.allowed_qk, whole[span.queries, span.keys])
        assert int(span.seen.allowed_qk.sum()) == int(whole[span.queries].sum())


def test_a_window_shortens_the_keys_of_a_block():
    near = torch.arange(16)[:, None] - torch.arange(16) < 3
    seen = DOCUMENTS[:, None].eq(DOCUMENTS).tril() & near
    for span in blocks_of("contiguous", 1, 4).spans(3):
        assert span.keys.start >= span.queries.start - 2
        assert int(span.seen.allowed_qk.sum()) == int(seen[span.queries].sum())


def test_tokens_and_blocks_of_documents_are_counted():
    assert blocks_of("contiguous", 1, 4).leaves == (13, 4)
    assert blocks_of("contiguous", 1, 2).leaves == (13, 7)
    assert [blocks_of("zigzag", 2, 4, Axis("cp", 2, rank)).leaves for rank in (0, 1)] == [(5, 2), (8, 2)]


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "balanced"])
def test_values_are_gathered_in_row_order_and_sums_return(order):
    def there_and_back(mesh):
        rows = blocks_of(order, 4, 2 if order == "zigzag" else 4, mesh["cp"])
        own = (rows.own_B[:, None] * rows.block + torch.arange(rows.block)).flatten()
        row = rows.gather(own * 10)
        return row.tolist(), torch.equal(rows.scatter_sum(row), own * 40)

    for row, is_back in simulate(there_and_back, cp=4):
        assert row == list(range(0, 160, 10))
        assert is_back


@pytest.mark.parametrize(
    ("order", "block", "how", "words"),
    [
        ("striped", 2, {}, "an order moves whole blocks"),
        ("zigzag", 8, {}, "an order moves whole blocks"),
        ("contiguous", 3, {}, "an order moves whole blocks"),
        ("contiguous", 4, {"algorithm": "ring"}, "use attention gathered"),
        ("contiguous", 4, {"algorithm": "ulysses"}, "use attention gathered"),
    ],
)
def test_a_row_that_does_not_split_into_blocks_is_refused(order, block, how, words):
    with pytest.raises(ShardingError, match=words):
        blocks_of(order, 2, block, **how)


def test_alone_every_attention_is_the_same():
    assert len(blocks_of("contiguous", 1, 4, algorithm="ring").own_B) == 4
