"""Heads traded among neighbours, rings over the rest, against the oracle."""

import pytest

from tests.helpers.attention_case import ORDERS, assert_right, by_ranks
from workbench.sharding.attention import ring


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("inner", "heads", "window"),
    [(2, (4, 2), None), (2, (4, 1), 3), (2, (4, 4), 12), (4, (4, 2), None), (1, (4, 2), 7)],
)
def test_output_and_gradients_are_the_oracles(order, inner, heads, window):
    assert_right(by_ranks(order, 4, "hybrid", heads, inner=inner, window=window), heads, window)


def test_a_ring_goes_over_the_outer_ranks_only(monkeypatch):
    seen = set()

    def watched(value, axis, caller, plain=ring.start_rotation):
        seen.add((axis.name, axis.size, tuple(axis.ranks)))
        return plain(value, axis, caller=caller)

    monkeypatch.setattr(ring, "start_rotation", watched)
    assert_right(by_ranks("zigzag", 4, "hybrid", (4, 2), inner=2), (4, 2))
    assert seen == {("cp_outer", 2, (0, 2)), ("cp_outer", 2, (1, 3))}
