"""Attention over traded heads, gathered or in rings, against the oracle; key heads that are fewer than ranks."""

import pytest
import torch

from tests.helpers.attention_case import ORDERS, assert_right, by_ranks
from workbench.errors import ShardingError
from workbench.sharding.attention import ring, ulysses
from workbench.sharding.mesh import Axis


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("cp", "heads", "window"),
    [(1, (4, 2), None), (2, (4, 2), 3), (4, (4, 2), None), (4, (4, 4), 1), (4, (4, 1), 7), (4, (8, 4), None)],
)
def test_output_and_gradients_are_the_oracles(order, cp, heads, window):
    assert_right(by_ranks(order, cp, "ulysses", heads, window=window), heads, window)


def test_heads_of_three_ranks():
    assert_right(by_ranks("striped", 3, "ulysses", (6, 3)), (6, 3))


def test_the_oracle_detects_unsummed_gradients_of_repeated_key_heads(monkeypatch):
    class FirstCopyOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, heads, copies):
            ctx.copies = copies
            return heads.repeat_interleave(copies, dim=1)

        @staticmethod
        def backward(ctx, d_heads):
            return d_heads[:, :: ctx.copies], None

    monkeypatch.setattr(ulysses, "repeat_heads", FirstCopyOnly.apply)
    with pytest.raises(AssertionError, match="key: "):
        assert_right(by_ranks("zigzag", 4, "ulysses", (4, 2)), (4, 2))


def test_the_oracle_sees_tokens_that_are_not_put_back(monkeypatch):
    def backwards(parts, shard, caller, plain=ulysses._traded_back):
        return plain([part.flip(2) for part in parts], shard, caller)

    monkeypatch.setattr(ulysses, "_traded_back", backwards)
    with pytest.raises(AssertionError, match="output: "):
        assert_right(by_ranks("contiguous", 2, "ulysses", (4, 2)), (4, 2))


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "copies"), [(8, 4, 2, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 8, 8)]
)
def test_key_heads_are_repeated_until_every_rank_has_one(queries, keys, ranks, copies):
    assert ulysses.check_heads(queries, keys, Axis("cp", ranks)) == copies


@pytest.mark.parametrize(("queries", "keys", "ranks"), [(4, 2, 8), (6, 3, 4), (12, 3, 2), (12, 6, 4), (12, 3, 4)])
def test_indivisible_heads_are_refused(queries, keys, ranks):
    with pytest.raises(ShardingError, match=f"{queries} query heads and {keys} key/value heads"):
        ulysses.check_heads(queries, keys, Axis("cp", ranks))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("inner", "heads", "window"),
    [(2, (4, 2), None), (2, (4, 1), 3), (2, (4, 4), 12), (4, (4, 2), None), (1, (4, 2), 7)],
)
def test_hybrid_output_and_gradients_are_the_oracles(order, inner, heads, window):
    assert_right(by_ranks(order, 4, "hybrid", heads, inner=inner, window=window), heads, window)


def test_a_ring_spans_the_outer_ranks_only(monkeypatch):
    seen = set()

    def watched(value, axis, plain=ring.start_rotation, **how):
        seen.add((axis.name, axis.size, tuple(axis.ranks)))
        return plain(value, axis, **how)

    monkeypatch.setattr(ring, "start_rotation", watched)
    assert_right(by_ranks("zigzag", 4, "hybrid", (4, 2), inner=2), (4, 2))
    assert seen == {("cp_outer", 2, (0, 2)), ("cp_outer", 2, (1, 3))}
