"""Shaped rewards, against manual values."""

import pytest
import torch

from workbench.errors import ShapeError, SpecError
from workbench.rollouts.advantages.inputs import bounded, kl_penalties, overlong, stop_properly

REWARDS = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)


def test_the_penalty_for_length_begins_with_the_buffer_and_does_not_stop_at_its_end():
    lengths = torch.tensor([7, 31, 40, 55])
    result = overlong(REWARDS, lengths, max_length=40, buffer=10, penalty=2.0)
    assert result.tolist() == pytest.approx([1.0, -0.5 - 0.2, 0.25 - 2.0, 2.0 - 5.0])


def test_a_truncated_completion_gets_a_share_of_its_reward():
    cut = torch.tensor([True, True, False, False])
    assert stop_properly(REWARDS, cut, coefficient=0.25).tolist() == [0.25, -0.125, 0.25, 2.0]


def test_rewards_are_clamped_to_bounds():
    assert bounded(REWARDS, -0.25, 1.5).tolist() == [1.0, -0.25, 0.25, 1.5]


def test_a_divergence_costs_its_coefficient():
    assert kl_penalties(torch.tensor([1.0, -0.5]), 0.2).tolist() == pytest.approx([0.2, -0.1])


@pytest.mark.parametrize(
    "settings",
    [{"max_length": 4, "buffer": 5}, {"max_length": 4, "buffer": 0}, {"max_length": 4, "buffer": 2, "penalty": -1.0}],
)
def test_a_buffer_that_is_none_is_refused(settings):
    with pytest.raises(SpecError, match="the last part of max_length"):
        overlong(REWARDS, torch.arange(4), **settings)


@pytest.mark.parametrize("coefficient", [-0.1, 1.1])
def test_a_coefficient_that_is_no_share_is_refused(coefficient):
    with pytest.raises(SpecError, match="between 0 and 1"):
        stop_properly(REWARDS, torch.ones(4).bool(), coefficient=coefficient)


def test_reversed_bounds_and_mismatched_lengths_are_refused():
    with pytest.raises(SpecError, match="low is at most high"):
        bounded(REWARDS, 1.0, 0.0)
    with pytest.raises(ShapeError, match="N=3"):
        overlong(REWARDS, torch.arange(3), max_length=4, buffer=2)
