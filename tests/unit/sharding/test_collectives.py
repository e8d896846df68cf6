"""Each collective forward and backward on two real ranks; the wrong adjoint is off by the axis size."""

import pytest
import torch

from tests.helpers.ranks import run_ranks
from workbench.sharding import collectives
from workbench.sharding.mesh import Axis, make_mesh


def derivative_of_a_shared_square(name):
    """d/dx_r of (x_0 + x_1)^2 / 2, where each rank back-propagates its own share of the loss: half of it."""
    mesh = make_mesh(cp=2)
    mine = torch.tensor(2.0 + 3.0 * mesh["cp"].rank, requires_grad=True)
    total = getattr(collectives, name)(mine, mesh["cp"])
    (total.square() / 4).backward()
    return float(total), float(mine.grad)


@pytest.mark.parametrize(("name", "gradient"), [("sum_sum", 7.0), ("sum_identity", 3.5)])
def test_all_reduce_has_two_adjoints(name, gradient, tmp_path):
    # x = (2, 5): the whole loss is 49 / 2 and its derivative 7. Shares need sum_sum; identity gives half.
    assert run_ranks(derivative_of_a_shared_square, 2, tmp_path, name) == [(7.0, gradient)] * 2


def derivative_of_a_replicated_use():
    mesh = make_mesh(tp=2)
    rank = mesh["tp"].rank
    x = torch.tensor(3.0, requires_grad=True)
    (collectives.identity_sum(x, mesh["tp"]) * (rank + 1)).backward()  # different computations of one value
    y = torch.tensor(3.0 + rank, requires_grad=True)
    (collectives.sum_identity(y, mesh["tp"]) * 10).backward()  # the same computation everywhere
    return float(x.grad), float(y.grad)


def test_replicated_values(tmp_path):
    assert run_ranks(derivative_of_a_replicated_use, 2, tmp_path) == [(3.0, 10.0)] * 2


def gathered():
    mesh = make_mesh(cp=2)
    rank = mesh["cp"].rank
    local = torch.tensor([[1.0, 2.0]]) + 10 * rank
    local.requires_grad_()
    whole = collectives.gather_scatter(local, mesh["cp"], dim=1)
    (whole * torch.tensor([[1.0, 2.0, 3.0, 4.0]]) * (rank + 1)).sum().backward()
    uneven = collectives.all_gather(torch.arange(rank + 1), mesh["cp"])
    flags = collectives.all_gather(torch.tensor([rank == 1]), mesh["cp"])
    return whole.tolist(), local.grad.tolist(), [u.tolist() for u in uneven], [f.item() for f in flags], flags[0].dtype


def test_gather_sums_the_gradients_of_all_users(tmp_path):
    first, second = run_ranks(gathered, 2, tmp_path)
    assert first[0] == second[0] == [[1.0, 2.0, 11.0, 12.0]]
    assert first[1] == [[3.0, 6.0]]  # 1 * (1 + 2), 2 * (1 + 2)
    assert second[1] == [[9.0, 12.0]]
    assert first[2] == second[2] == [[0], [0, 1]]
    assert first[3] == [False, True]
    assert first[4] == torch.bool


@pytest.mark.parametrize("name", ["sum_identity", "sum_sum", "identity_sum"])
def test_axis_of_one_rank_is_the_identity(name):
    x = torch.randn(3)
    assert getattr(collectives, name)(x, Axis("tp")) is x


def extremes():
    mesh = make_mesh(dp=2)
    value = torch.tensor([float(mesh["dp"].rank), -torch.inf])
    return collectives.all_max(value, mesh["dp"]).tolist(), value.tolist()


def test_max_has_minus_infinity_as_identity(tmp_path):
    assert run_ranks(extremes, 2, tmp_path)[0] == ([1.0, -torch.inf], [0.0, -torch.inf])
