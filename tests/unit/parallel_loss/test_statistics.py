"""Statistics over ranks against those of everything in one place, with a rank that has nothing."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.aligned_ranks import on_ranks
from workbench.parallel_loss.statistics import largest, mean_and_std

VALUES = torch.tensor([[1.0, -2.0, 100.0], [3.0, 0.25, 7.0], [float("nan"), 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("correction", [0, 1])
def test_mean_and_std_are_those_of_all_tokens(correction):
    everything = VALUES[MASK].double()

    def rank(align, _, c):
        return mean_and_std(VALUES[c], MASK[c], (align.cp,), correction=correction)

    for result in on_ranks(rank, cp=3):
        assert float(result.mean) == pytest.approx(float(everything.mean()), rel=1e-6)
        assert float(result.std) == pytest.approx(float(everything.std(correction=correction)), rel=1e-6)
        assert (int(result.count), result.mean.dtype) == (5, torch.float32)


def test_a_large_offset_costs_no_digits():
    result = mean_and_std(torch.tensor([1e6, 1e6 + 1, 1e6 + 2]), torch.ones(3, dtype=torch.bool), (), correction=0)
    assert float(result.std) == pytest.approx((2 / 3) ** 0.5, rel=1e-6)


def test_of_nothing_there_is_no_spread():
    result = mean_and_std(torch.full((2,), torch.nan), torch.zeros(2, dtype=torch.bool), (), correction=1)
    assert (float(result.mean), float(result.std), int(result.count)) == (0.0, 0.0, 0)


@pytest.mark.parametrize("correction", [0, 1])
def test_one_value_is_its_own_mean_without_a_spread(correction):
    result = mean_and_std(VALUES[0], torch.tensor([False, True, False]), (), correction=correction)
    assert (float(result.mean), float(result.std), int(result.count)) == (-2.0, 0.0, 1)


def test_a_rank_without_any_place_has_no_maximum():
    assert float(largest(torch.zeros(0), torch.zeros(0, dtype=torch.bool), ())) == -torch.inf


def test_an_empty_rank_does_not_touch_a_maximum():
    values = -VALUES.abs()
    assert on_ranks(lambda align, d, c: float(largest(values[c], MASK[c], (align.cp,))), cp=3) == [-0.25] * 3
    assert float(largest(values[2], MASK[2], ())) == -torch.inf
