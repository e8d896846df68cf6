"""Whole rows on every rank, and numbers of rows added in the order of the rows."""

import math

import pytest
import torch

from tests.helpers.same_bits import same_bits
from workbench.reproducible.rows import (
    mean_by_halves,
    rows_in_order,
    sum_by_pairs,
    sum_in_order,
    sum_over_pieces,
    whole_row,
)
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan
from workbench.sharding.simulated import simulate


@pytest.mark.parametrize(("order", "cp"), [("contiguous", 2), ("zigzag", 2), ("zigzag", 4), ("balanced", 2)])
def test_every_rank_has_the_row_and_takes_back_its_own_tokens(order, cp):
    plan = ShardPlan.make(order, num_tokens=16, cp=cp, block_tokens=4, document_lengths=[5, 11])
    row_T, wanted_T = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))

    def rank(mesh):
        own_t = plan.split(row_T, mesh["cp"].rank).requires_grad_()
        (whole_row(own_t, plan, mesh["cp"]) * wanted_T).sum().backward()
        return whole_row(own_t, plan, mesh["cp"]).detach(), own_t.grad

    for number, (whole_T, gradient_t) in enumerate(simulate(rank, cp=cp)):
        assert torch.equal(whole_T, row_T)
        assert torch.equal(gradient_t, plan.split(wanted_T, number))


def test_a_row_of_one_rank_is_itself_and_the_sign_of_a_zero_stays():
    plan = ShardPlan.make("contiguous", num_tokens=3, cp=1)
    values_T = torch.tensor([1.0, -0.0, 2.0], requires_grad=True)
    (whole_row(values_T, plan, Axis("cp")) * torch.tensor([1.0, -0.0, 1.0])).sum().backward()
    assert math.copysign(1, float(values_T.grad[1])) == -1.0
    assert same_bits(whole_row(values_T.detach(), plan, Axis("cp")), values_T.detach())


NUMBERS = torch.tensor([1e16, 1.0, -1e16, 3.0], dtype=torch.float64)[:, None]
"""Whose sum depends on the order."""


def test_rows_are_added_in_the_order_of_their_numbers_on_any_rank():
    expected = float(((NUMBERS[0] + NUMBERS[1]) + NUMBERS[2]) + NUMBERS[3])
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]):
        held = torch.tensor(order)
        assert float(sum_in_order(NUMBERS[held], held, Axis("dp"))) == expected

        def rank(mesh, held=held):
            local = held.view(2, 2)[mesh["dp"].rank]
            return float(sum_in_order(NUMBERS[local], local, mesh["dp"]))

        assert simulate(rank, dp=2) == [expected, expected]
    assert expected != float(NUMBERS.flip(0).sum()), "the numbers must tell orders apart"


def test_a_row_of_zeros_changes_nothing_at_any_position():
    with_zeros = torch.cat([NUMBERS, torch.zeros(1, 1)])
    for place in (-1, 0, 2, 9):
        numbers = torch.tensor([0, 1, 2, 3, place])
        assert float(sum_in_order(with_zeros, numbers, Axis("dp"))) == float(
            sum_in_order(NUMBERS, torch.arange(4), Axis("dp"))
        )


def test_lines_come_in_the_order_of_their_numbers():
    lines = torch.tensor([[5.0, 6.0], [1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    assert rows_in_order(lines, torch.tensor([7, 0, 3]), Axis("dp")).tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@pytest.mark.parametrize("width", [1, 2, 3, 7, 16, 33])
def test_a_mean_by_halves_does_not_depend_on_other_rows(width):
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
        by_rank = simulate(
            lambda mesh, tp=tp: sum_over_pieces(
                pieces[mesh["tp"].rank * 8 // tp : (mesh["tp"].rank + 1) * 8 // tp], mesh["tp"]
            ),
            tp=tp,
        )
        assert all(torch.equal(one, expected) for one in by_rank)
