"""Who sees whom: the mask, and what is said of it without making it, against the rule written out."""

import pytest
import torch

from tests.helpers.attention_case import ORDERS, STRETCHES, plan
from tests.oracles.attention import sees
from workbench.sharding.attention.block import Block


def block(queries, keys, window=None, documents=STRETCHES):
    ids = torch.tensor(documents)
    return Block(queries, keys, ids[queries], ids[keys], window)


def written_out(made):
    return [
        [sees(at, key, STRETCHES, made.window) for key in made.key_positions_k.tolist()]
        for at in made.query_positions_q.tolist()
    ]


@pytest.mark.parametrize("window", [None, 1, 3, 12])
@pytest.mark.parametrize("order", ORDERS)
def test_everything_it_says_is_the_rule_written_out(order, window):
    lay = plan(order, 4)
    for rank in range(4):
        for source in range(4):
            made = block(lay.positions(rank), lay.positions(source), window)
            expected = written_out(made)
            assert made.allowed_qk.tolist() == expected
            assert made.sees_q.tolist() == [any(row) for row in expected]
            assert made.is_empty == (not any(map(any, expected)))
            assert made.every_query_sees == all(map(any, expected))


def test_a_row_against_itself_sees_itself_whatever_the_window():
    everyone = torch.arange(len(STRETCHES))
    made = block(everyone, everyone, window=1)
    assert torch.equal(made.allowed_qk, torch.eye(len(STRETCHES), dtype=torch.bool))


def test_a_later_key_in_between_hides_no_earlier_one():
    """The last key that is not after a query decides; keys stand in any order."""
    made = block(torch.tensor([3, 9]), torch.tensor([10, 2, 8]), documents=[0] * 12)
    assert (made.allowed_qk.tolist(), made.sees_q.tolist()) == ([[False, True, False], [False, True, True]], [True] * 2)


def test_no_keys_are_seen_by_nobody():
    made = block(torch.tensor([3, 9]), torch.tensor([], dtype=torch.int64))
    assert made.is_empty
    assert made.sees_q.tolist() == [False, False]


def test_some_of_the_queries_have_their_part_of_the_mask():
    lay = plan("zigzag", 2)
    made = block(lay.positions(1), lay.positions(0), 5)
    assert torch.equal(made.allowed_on("cpu", slice(3, 17)), made.allowed_qk[3:17])


def test_what_is_derived_from_it_is_made_once():
    made, calls = block(torch.arange(2), torch.arange(2)), []
    found = [made.once(name, lambda name=name: calls.append(name) or [name]) for name in ("a", "b", "a")]
    assert (calls, found) == (["a", "b"], [["a"], ["b"], ["a"]])
    assert found[0] is found[2]
