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


def test_ranks_that_are_no_power_of_two():
    assert_right(by_ranks("striped", 3, "gathered", (4, 2)), (4, 2))


def test_the_oracle_sees_a_gradient_that_is_not_summed_over_ranks(monkeypatch):
    monkeypatch.setattr(gathered, "scatter_sum", lambda pieces_R, axis, caller: pieces_R[axis.rank])
    found = by_ranks("zigzag", 2, "gathered", (4, 2))
    with pytest.raises(AssertionError, match="key: "):
        assert_right(found, (4, 2))
    assert_right(found[:2] + by_ranks("zigzag", 1, "gathered", (4, 2))[2:], (4, 2))  # output and query are right


def test_half_precision_is_summed_over_ranks_in_float32(monkeypatch):
    travelled = set()

    def watched(pieces_R, axis, caller, plain=gathered.scatter_sum):
        travelled.add(pieces_R.dtype)
        return plain(pieces_R, axis, caller=caller)

    monkeypatch.setattr(gathered, "scatter_sum", watched)
    found = by_ranks("zigzag", 2, "gathered", (4, 2), dtype=torch.bfloat16)
    assert travelled == {torch.float32}
    assert {x.dtype for x in found} == {torch.bfloat16}
    assert_right(found, (4, 2), atol=0.15)
