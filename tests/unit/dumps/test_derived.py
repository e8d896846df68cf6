"""Ratios and clip decisions follow from recorded logs and losses; containers are compared bit by bit."""

import math

import pytest
import torch

from workbench.dumps.derived import clipped_of, ratios_of, same_content


def test_ratios_are_bounded():
    assert ratios_of(torch.tensor([0.0, 1.0, 50.0]), bound=2.0).tolist() == pytest.approx([1.0, math.e, math.e**2])


def test_a_token_is_clipped_where_its_loss_is_another():
    ratios_T, advantages_T = torch.tensor([1.5, 1.5, 0.5, 2.0]), torch.tensor([1.0, -1.0, 1.0, 0.0])
    losses_T = torch.tensor([-1.2, 1.5, -0.5 * (1 + 1e-7), 0.0])
    assert clipped_of(losses_T, ratios_T, advantages_T).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 1]}, True),
        ({"a": [torch.ones(2), 1]}, {"a": [torch.zeros(2), 1]}, False),
        ([torch.ones(2)], [torch.ones(2).double()], False),
        ([torch.ones(2)], [[1.0, 1.0]], False),
        ({"a": 1}, {"b": 1}, False),
        ((1, 2), (1, 2, 3), False),
        (1, True, False),
    ],
)
def test_containers_are_compared(one, other, same):
    assert same_content(one, other) is same
