import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.plan import ShardPlan


def test_zigzag_pairs_first_and_last_chunks():
    plan = ShardPlan.make("zigzag", num_tokens=12, cp=3)
    assert [plan.positions(r).tolist() for r in range(3)] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_contiguous_cuts_in_order():
    plan = ShardPlan.make("contiguous", num_tokens=6, cp=3)
    assert [plan.positions(r).tolist() for r in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_causal_work_of_zigzag_is_equal_to_the_element():
    plan = ShardPlan.make("zigzag", num_tokens=64, cp=4)
    work = [int((plan.positions(rank) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1
    contiguous = ShardPlan.make("contiguous", num_tokens=64, cp=4)
    assert len({int((contiguous.positions(rank) + 1).sum()) for rank in range(4)}) == 4


def test_merge_undoes_split_for_matrices():
    plan = ShardPlan.make("zigzag", num_tokens=8, cp=2)
    whole = torch.randn(8, 3)
    assert torch.equal(plan.merge(torch.cat([plan.split(whole, r) for r in range(2)])), whole)


def test_tokens_that_do_not_divide_are_refused_in_words():
    with pytest.raises(ShardingError) as caught:
        ShardPlan.make("zigzag", num_tokens=1004, cp=4)
    assert str(caught.value) == (
        "shard plan: zigzag order of 1004 tokens over cp=4\n"
        "  found: 1004 tokens\n"
        "  rule: a positive multiple of 2 * cp = 8\n"
        "  do: pad the row to 1008 tokens (pack(..., multiple_of=...); data.multiple_of unset does it)")


def test_unknown_order_is_refused_by_name():
    with pytest.raises(ShardingError, match="order 'striped'"):
        ShardPlan.make("striped", num_tokens=8, cp=2)
