"""Each pair of an all-reduce's adjoint and an engine, by the factor that it is off; ours is off by 1 under both."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.aligned_ranks import on_ranks, reduced
from workbench.parallel_loss.adjoints import global_to_local, local_to_global
from workbench.sharding.collectives import identity_sum, sum_identity, sum_sum

VALUES = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.25, 7.0], [0.0, 0.0, 0.0], [1.5, -1.0, 2.0]], dtype=torch.float64)
"""[ranks, tokens]; one rank has nothing to add."""
KEPT = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.float64)
WEIGHT = 0.7


def truth():
    """d/dw of (sum of kept w x)^2, on one rank."""
    weight = torch.tensor(WEIGHT, dtype=torch.float64, requires_grad=True)
    (KEPT * VALUES * weight).sum().square().backward()
    return weight.grad


def gradient(complete, engine, ranks=2):
    """The same, of the ranks of an engine that complete their sum in a way."""

    def rank(align, _, c):
        weight = torch.tensor(WEIGHT, dtype=torch.float64, requires_grad=True)
        rows = slice(c * 4 // ranks, (c + 1) * 4 // ranks)
        complete((KEPT[rows] * VALUES[rows] * weight).sum(), align).square().backward()
        return weight.grad

    return reduced(on_ranks(rank, cp=ranks, engine=engine), engine)


PAIRS = {
    "all-reduce backward": lambda partial, align: sum_sum(partial, align.cp),
    "identity backward": lambda partial, align: sum_identity(partial, align.cp),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("backward", "engine", "factor"),
    [
        ("all-reduce backward", "sum", lambda n: n),
        ("all-reduce backward", "mean", lambda n: 1),
        ("identity backward", "sum", lambda n: 1),
        ("identity backward", "mean", lambda n: 1 / n),
    ],
)
def test_a_pair_that_does_not_belong_together_is_off_by_the_ranks(backward, engine, factor, ranks):
    assert gradient(PAIRS[backward], engine, ranks) / truth() == pytest.approx(factor(ranks), rel=1e-14)


@pytest.mark.parametrize("engine", ["sum", "mean"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_border_to_whole_numbers_is_right_for_both_engines(engine, ranks):
    def ours(partial, align):
        return local_to_global(partial, (align.cp, *align.dp), align.factor)

    assert gradient(ours, engine, ranks) == pytest.approx(float(truth()), rel=1e-14)


def across_and_back(back, engine):
    """d/dw of sum_t w x_t * (sum of w x), through a whole number that each rank's tokens use for themselves."""

    def rank(align, _, c):
        weight = torch.tensor(WEIGHT, dtype=torch.float64, requires_grad=True)
        mine = VALUES[2 * c : 2 * c + 2] * KEPT[2 * c : 2 * c + 2]
        axes = (align.cp, *align.dp)
        whole = local_to_global((mine * weight).sum(), axes, align.factor)
        again = (mine.square() * weight * back(whole, axes, align)).sum()
        local_to_global(again, axes, align.factor).backward()
        return weight.grad

    return reduced(on_ranks(rank, cp=2, engine=engine), engine)


def whole_across_and_back():
    weight = torch.tensor(WEIGHT, dtype=torch.float64, requires_grad=True)
    kept = VALUES * KEPT
    ((kept * weight).sum() * (kept.square() * weight).sum()).backward()
    return float(weight.grad)


@pytest.mark.parametrize("engine", ["sum", "mean"])
def test_a_whole_number_comes_back_to_the_tokens(engine):
    found = across_and_back(lambda whole, axes, align: global_to_local(whole, axes, align.factor), engine)
    assert found == pytest.approx(whole_across_and_back(), rel=1e-14)


@pytest.mark.parametrize(
    ("name", "back", "engine"),
    [
        ("as it is", lambda whole, axes, align: whole, "sum"),
        ("as it is", lambda whole, axes, align: whole, "mean"),
        ("without the division", lambda whole, axes, align: identity_sum(whole, align.cp), "mean"),
    ],
)
def test_other_ways_back_are_wrong(name, back, engine):
    assert abs(across_and_back(back, engine) / whole_across_and_back() - 1) > 0.05, name
