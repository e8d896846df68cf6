"""Each pair of an all-reduce's adjoint and an engine, by the factor that it is off; ours is off by 1 under both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.aligned_ranks import on_ranks, reduced
from tests.helpers.ranks import run_ranks
from workbench.errors import SpecError
from workbench.parallel_loss.adjoints import engine_factor, global_to_local, local_to_global
from workbench.sharding.collectives import identity_sum, sum_identity, sum_sum
from workbench.sharding.mesh import AXES, Axis, Mesh, make_mesh, single_process_mesh

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
        local = VALUES[2 * c : 2 * c + 2] * KEPT[2 * c : 2 * c + 2]
        axes = (align.cp, *align.dp)
        whole = local_to_global((local * weight).sum(), axes, align.factor)
        again = (local.square() * weight * back(whole, axes, align)).sum()
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
    result = across_and_back(lambda whole, axes, align: global_to_local(whole, axes, align.factor), engine)
    assert result == pytest.approx(whole_across_and_back(), rel=1e-14)


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


# -- engines that average ------------------------------------------------------------------------------------------

TOKENS = torch.tensor([[1.0, -2.0], [0.5, 3.0], [2.0, 2.0], [-1.0, 0.25]], dtype=torch.float64)
TRAINED = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64) / 3
"""Weights of the whole step. Rank 1 has one trained token, rank 0 two; rank 2 of three would have none."""


def model():
    layer = nn.Linear(2, 3, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.arange(6).view(3, 2) / 10)
    return layer


def part_of_loss(layer, chosen):
    return (layer(TOKENS[chosen]).square() * TRAINED[chosen]).sum()


def averaged(engine, axes):
    """The gradient that an engine as it comes out of the box gives to a part of the loss times the factor."""
    mesh = make_mesh(**axes)
    axis = mesh["dp_cp"]
    local = slice(0, 3) if axis.rank == 0 else slice(3, 4)
    layer, factor = model(), engine_factor(mesh, "mean")
    if engine == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(layer, process_group=axis.group)
        (part_of_loss(wrapped, local) * factor).backward()
        return layer.weight.grad, repr(factor)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer, mesh=DeviceMesh.from_group(axis.group, "cpu"))
    (factor * part_of_loss(layer, local)).backward()
    return layer.weight.grad.full_tensor(), repr(factor)


def every_engine():
    return {(engine, name): averaged(engine, {name: 2}) for engine in ("ddp", "fsdp2") for name in ("dp", "cp")}


def test_averaging_engines_get_the_sum(tmp_path):
    layer = model()
    part_of_loss(layer, slice(0, 4)).backward()
    for result in run_ranks(every_engine, 2, tmp_path):
        assert len(result) == 4
        for engine, (gradient, _) in result.items():
            torch.testing.assert_close(gradient, layer.weight.grad, rtol=1e-14, atol=0, msg=str(engine))
        assert result["ddp", "cp"][1] == (
            "loss * 2: gradients are averaged over 2 ranks (dp=1 x cp=2), and each back-propagates a part of a sum"
        )


def test_the_factor_is_of_dp_and_cp_and_never_of_tp_or_pp():
    axes = {name: Axis(name, {"dp": 2, "cp": 3}.get(name, 5)) for name in AXES}
    mesh = Mesh(axes | {"dp_cp": Axis("dp_cp", 6)}, torch.device("cpu"))
    assert engine_factor(mesh, "mean") == 6
    assert engine_factor(mesh, "sum") == 1
    assert repr(engine_factor(mesh, "sum")) == "loss * 1: gradients are summed over 6 ranks (dp=2 x cp=3)"
    assert "1 rank (" in repr(engine_factor(single_process_mesh(), "mean"))


def test_another_reduction_is_refused():
    with pytest.raises(SpecError, match="sum or mean"):
        engine_factor(single_process_mesh(), "max")
