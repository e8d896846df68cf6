"""Shards of an external trainer over tp are put together as a plan says."""

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.errors import SpecError
from workbench.sharding.given_parameters import GivenParameters, Part, TensorShards
from workbench.sharding.mesh import Axis, world_axis
from workbench.sharding.tensor_parallel import ParameterShard

PARTIAL = ParameterShard(gradient_is_partial=True)
PLAN = {"columns.*": 0, "rows.weight": 1, "gated.weight": ParameterShard(dim=0, parts=(4, 4)), "rows.bias": PARTIAL}


def whole_model():
    """Of the sizes of two ranks together, with gradients."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "columns": nn.Linear(3, 4),
            "rows": nn.Linear(4, 3),
            "gated": nn.Linear(2, 8, bias=False),
            "norm": nn.LayerNorm(3),
        }
    ).double()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def of_rank(name, value, rank):
    """A rank's shard of a whole value, as `PLAN` has it, without the code under test."""
    if name == "gated.weight":
        gate, up = value.chunk(2)
        return torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
    dim = {"columns.weight": 0, "columns.bias": 0, "rows.weight": 1}.get(name)
    return value if dim is None else value.chunk(2, dim)[rank]


def sharded_model(rank):
    whole = whole_model()
    model = nn.ModuleDict({name: nn.Module() for name in whole})
    for name, value in whole.named_parameters():
        owner, _, attribute = name.partition(".")
        parameter = nn.Parameter(of_rank(name, value.detach(), rank).clone())
        parameter.grad = of_rank(name, value.grad, rank).clone()
        if name == "rows.bias":  # parts of a sum
            parameter.grad *= 0.25 if rank else 0.75
        model[owner].register_parameter(attribute, parameter)
    return model


def read_on_ranks():
    model = sharded_model(torch.distributed.get_rank())
    shards = TensorShards(nn.ModuleDict({"module": model}), PLAN, world_axis())
    named = dict(model.named_parameters())
    before = {name: value.grad.clone() for name, value in named.items()}
    gradients = {name: shards.whole_gradient(value).clone() for name, value in named.items()}
    shapes = {name: tuple(shards.weights(value).shape) for name, value in named.items()}
    assert all(torch.equal(value.grad, before[name]) for name, value in named.items()), "gradients are only read"
    assert isinstance(shards.weights(model["rows"].weight), Part)
    assert shards.weights(model["norm"].weight) is model["norm"].weight
    norms = shards.norms(named)
    if torch.distributed.get_rank():
        model["columns"].weight.grad = None  # of this rank alone
    return gradients, shapes, norms, shards.norms(named)["columns.weight"]


def test_shards_make_whole_gradients_norms_and_shapes(tmp_path):
    whole = dict(whole_model().named_parameters())
    for gradients, shapes, norms, of_one_rank in run_ranks(read_on_ranks, 2, tmp_path):
        assert shapes == {name: tuple(value.shape) for name, value in whole.items()}
        for name, value in whole.items():
            torch.testing.assert_close(gradients[name], value.grad, rtol=1e-14, atol=1e-15, msg=name)
            assert norms[name] == pytest.approx(value.grad.norm().item(), rel=1e-14), name
        first = of_rank("columns.weight", whole["columns.weight"].grad, 0)
        assert of_one_rank == pytest.approx(first.norm().item(), rel=1e-14), "a missing gradient is 0"


def test_one_rank_has_whole_parameters():
    model = whole_model()
    shards = TensorShards(model, PLAN, Axis("tp"))
    assert all(shards.weights(value) is value for value in model.parameters())
    assert shards.norms(dict(model.named_parameters())) == pytest.approx(
        GivenParameters().norms(dict(model.named_parameters()))
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"colums.*": 0}, "correct the pattern"),
        ({"rows.*": ParameterShard(over_dp_cp=True)}, "parameters of FSDP2 are DTensors"),
    ],
)
def test_a_plan_that_matches_nothing_or_is_none_of_tp_is_refused(plan, message):
    with pytest.raises(SpecError, match=message):
        TensorShards(whole_model(), plan, Axis("tp"))


def test_the_first_pattern_that_matches_counts():
    shards = TensorShards(whole_model(), {"rows.bias": PARTIAL, "rows.*": 1}, Axis("tp", size=2))
    assert shards.whole_shape("rows.weight", torch.Size([3, 2])) == (3, 4)
    assert shards.whole_shape("rows.bias", torch.Size([3])) == (3,)
