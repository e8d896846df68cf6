import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.errors import SpecError
from workbench.parallel_loss.averaging import engine_factor
from workbench.sharding.mesh import AXES, Axis, Mesh, make_mesh, single_process_mesh

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
    mine = slice(0, 3) if axis.rank == 0 else slice(3, 4)
    layer, factor = model(), engine_factor(mesh, "mean")
    if engine == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(layer, process_group=axis.group)
        (part_of_loss(wrapped, mine) * factor).backward()
        return layer.weight.grad, repr(factor)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(layer, mesh=DeviceMesh.from_group(axis.group, "cpu"))
    (factor * part_of_loss(layer, mine)).backward()
    return layer.weight.grad.full_tensor(), repr(factor)


def every_engine():
    return {(engine, name): averaged(engine, {name: 2}) for engine in ("ddp", "fsdp2") for name in ("dp", "cp")}


def test_what_averages_gives_the_sum(tmp_path):
    layer = model()
    part_of_loss(layer, slice(0, 4)).backward()
    for found in run_ranks(every_engine, 2, tmp_path):
        assert len(found) == 4
        for engine, (gradient, _) in found.items():
            torch.testing.assert_close(gradient, layer.weight.grad, rtol=1e-14, atol=0, msg=str(engine))
        assert found["ddp", "cp"][1] == (
            "loss * 2: gradients are averaged over 2 ranks (dp=1 x cp=2), and each back-propagates a part of a sum"
        )


def test_the_factor_is_of_dp_and_cp_and_never_of_tp():
    axes = {name: Axis(name, size) for name, size in zip(AXES, (2, 3, 4), strict=True)}
    mesh = Mesh(axes | {"dp_cp": Axis("dp_cp", 6)}, torch.device("cpu"))
    assert engine_factor(mesh, "mean") == 6
    assert engine_factor(mesh, "sum") == 1
    assert repr(engine_factor(mesh, "sum")) == "loss * 1: gradients are summed over 6 ranks (dp=2 x cp=3)"
    assert "1 rank (" in repr(engine_factor(single_process_mesh(), "mean"))


def test_another_reduction_is_refused():
    with pytest.raises(SpecError, match="sum or mean"):
        engine_factor(single_process_mesh(), "max")
