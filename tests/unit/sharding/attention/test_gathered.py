"""Gathered attention over threads against the oracle, in every order."""

import pytest
import torch

from tests.helpers.attention_case import ORDERS, assert_right, by_ranks
from workbench.sharding.attention import gathered


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("cp", "heads", "window"), [(1, (4, 2), None), (2, (4, 2), 3), (4, (4, 2), None), (4, (4, 4), 1), (4, (4, 1), 7)]
)
def test_output_and_gradients_are_the_oracles(order, cp, heads, window):
    assert_right(by_ranks(order, cp, "gathered", heads, window=window), heads, window)


@pytest.mark.parametrize(("cp", "heads", "window"), [(2, (4, 2), None), (4, (8, 4), 3), (2, (4, 1), None)])
def test_heads_in_two_parts_are_the_oracles(cp, heads, window, monkeypatch):
    whole = by_ranks("document_zigzag", cp, "gathered", heads, window=window)
    monkeypatch.setattr(gathered, "PARTS_FROM_TOKENS", 1)
    in_parts = by_ranks("document_zigzag", cp, "gathered", heads, window=window)
    assert_right(in_parts, heads, window)
    assert all(torch.equal(one, other) for one, other in zip(whole, in_parts, strict=True))


def test_ranks_that_are_no_power_of_two():
    assert_right(by_ranks("striped", 3, "gathered", (4, 2)), (4, 2))


def test_the_oracle_sees_a_gradient_that_is_not_summed_over_ranks(monkeypatch):
    monkeypatch.setattr(gathered, "start_scatter_sum", lambda pieces_R, axis, caller: lambda: pieces_R[axis.rank])
    by_rank = by_ranks("zigzag", 2, "gathered", (4, 2))
    with pytest.raises(AssertionError, match="key: "):
        assert_right(by_rank, (4, 2))
    assert_right(by_rank[:2] + by_ranks("zigzag", 1, "gathered", (4, 2))[2:], (4, 2))  # output and query are right


def test_half_precision_is_summed_over_ranks_in_float32(monkeypatch):
    travelled = set()

    def watched(pieces_R, axis, caller, plain=gathered.start_scatter_sum):
        travelled.add(pieces_R.dtype)
        return plain(pieces_R, axis, caller=caller)

    monkeypatch.setattr(gathered, "start_scatter_sum", watched)
    by_rank = by_ranks("zigzag", 2, "gathered", (4, 2), dtype=torch.bfloat16)
    assert travelled == {torch.float32}
    assert {x.dtype for x in by_rank} == {torch.bfloat16}
    assert_right(by_rank, (4, 2), atol=0.15)


@pytest.mark.parametrize("window", [None, 3])
def test_keys_travel_that_another_rank_sees_and_no_others(window, monkeypatch):
    travelled = []

    def watched(value, axis, plain=gathered.start_gather, **how):
        travelled.append(len(value))
        return plain(value, axis, **how)

    monkeypatch.setattr(gathered, "start_gather", watched)
    assert_right(by_ranks("contiguous", 4, "gathered", (4, 2), window=window), (4, 2), window)
    [count] = set(travelled)
    assert count == (2 if window else 4)  # of 8


@pytest.mark.parametrize(("limit", "parts"), [(4, 2), (5, 1)])
def test_heads_are_in_parts_if_many_keys_travel_not_if_a_rank_has_many(limit, parts, monkeypatch):
    travelled = []

    def watched(value, axis, plain=gathered.start_gather, **how):
        travelled.append(len(value))
        return plain(value, axis, **how)

    monkeypatch.setattr(gathered, "PARTS_FROM_TOKENS", limit)
    monkeypatch.setattr(gathered, "start_gather", watched)
    assert_right(by_ranks("contiguous", 4, "gathered", (4, 2)), (4, 2))
    assert travelled == [4] * (4 * 2 * parts)  # of 8 tokens; on 4 ranks, forward and backward
