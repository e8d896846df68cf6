"""Replicas that differ are found, on every rank and with the ranks that differ; rounding is let pass."""

import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.bridge.replicas import check_replicas
from workbench.sharding.bridge.sides import Share, Side
from workbench.sharding.simulated import simulate

SIDE = Side((Share((0, 2), torch.tensor([0, 1])), Share((1,), torch.tensor([0, -1]), torch.tensor([True, False]))))
HELD = [
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    torch.tensor([[1.0, 0.0], [5.0, 5.0]]),
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
]


def held(changed=None, to=None):
    def of_rank(mesh):
        rank = mesh["dp"].rank
        check_replicas(to if rank == changed else HELD[rank], SIDE, mesh["dp"], what="values")
        return True

    return simulate(of_rank, dp=3)


def test_replicas_may_differ_by_rounding_and_padding_may_be_anything():
    assert held() == [True] * 3
    assert held(2, HELD[2] * (1 + 1e-6)) == [True] * 3


@pytest.mark.parametrize(
    ("changed", "to", "words"),
    [
        (2, HELD[2] / 2, r"rank\(s\) \[2\] differ from rank 0"),
        (2, HELD[2].flip(0), r"rank\(s\) \[2\] differ from rank 0"),
        (2, HELD[2] * float("nan"), r"rank\(s\) \[2\] differ from rank 0"),
        (1, torch.zeros(2, 3), "rows of 2 and 3 numbers"),
        (1, torch.zeros(2, 2, dtype=torch.bfloat16), r"in 2 precision\(s\)"),
    ],
)
def test_what_differs_is_named(changed, to, words):
    with pytest.raises(ShardingError, match=words):
        held(changed, to)


def test_a_gradient_where_none_should_be_is_named():
    side = Side((Share((0,), torch.tensor([0, 1]), torch.tensor([True, False])),))
    with pytest.raises(ShardingError, match=r"something other than zero on rank\(s\) \[0\]"):
        simulate(lambda mesh: check_replicas(HELD[0], side, mesh["dp"], what="gradients"))
