"""Sums in one order: by halves of a width, by pairs of pieces, whoever holds them."""

import pytest
import torch

from workbench.reproducible.trees import mean_by_halves, sum_by_pairs, sum_over_pieces
from workbench.sharding.simulated import simulate


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 33])
def test_a_mean_by_halves_is_a_mean_and_knows_no_other_row(width):
    values = torch.randn(50, width)
    mean = mean_by_halves(values)
    torch.testing.assert_close(mean, values.double().mean(-1, keepdim=True).float(), rtol=1e-5, atol=1e-6)
    for row in range(50):
        assert torch.equal(mean_by_halves(values[row : row + 1].clone()), mean[row : row + 1])


def test_pieces_of_several_ranks_are_added_as_those_of_one():
    pieces = list(torch.randn(8, 5, 3) * 10.0 ** torch.randint(-4, 4, (8, 1, 1)))
    expected = sum_by_pairs(pieces)
    assert not torch.equal(expected, torch.stack(pieces).cumsum(0)[-1])
    for tp in (1, 2, 4, 8):
        found = simulate(
            lambda mesh, tp=tp: sum_over_pieces(
                pieces[mesh["tp"].rank * 8 // tp : (mesh["tp"].rank + 1) * 8 // tp], mesh["tp"]
            ),
            tp=tp,
        )
        assert all(torch.equal(one, expected) for one in found)
