import math

import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError
from workbench.policy.model import load_policy
from workbench.sharding import collectives
from workbench.sharding.gradients import (
    copy_local_part,
    full_gradients,
    full_tensor,
    full_weights,
    given_gradient,
    given_norms,
    gradient_norms,
    sum_gradients,
    trained_parameters,
    weight_norms,
)
from workbench.sharding.mesh import make_mesh, single_process_mesh, world_axis
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import ParameterShard


def rank_gradients():
    """A parameter cut over tp, one whole with a whole gradient, one whole with a partial gradient."""
    mesh = make_mesh(dp=2, tp=2)
    dp, tp = mesh["dp"].rank, mesh["tp"].rank
    model = nn.ParameterDict(
        {
            "cut": nn.Parameter(torch.tensor([1.0, 2.0]) + 2 * tp),
            "whole": nn.Parameter(torch.zeros(1)),
            "partial": nn.Parameter(torch.zeros(1)),
            "idle": nn.Parameter(torch.zeros(1)),
        }
    )
    model["cut"].grad = torch.tensor([1.0, 2.0]) * (1 + tp) * (1 + dp)
    model["whole"].grad = torch.tensor([5.0]) * (1 + dp)
    model["partial"].grad = torch.tensor([1.0 + tp])
    if dp == 1 and tp == 1:
        model["idle"].grad = None
    else:
        model["idle"].grad = torch.tensor([float(dp)])
    shards = {
        "cut": ParameterShard(0),
        "whole": ParameterShard(),
        "partial": ParameterShard(gradient_is_partial=True),
        "idle": ParameterShard(),
    }
    reduced = []
    counted = collectives.wire.all_reduce
    collectives.wire.all_reduce = lambda tensor, *more: (reduced.append(tuple(tensor.shape)), counted(tensor, *more))
    sum_gradients(model, shards, mesh)
    collectives.wire.all_reduce = counted
    norms = {name: float(norm) for name, norm in gradient_norms(model, shards, mesh).items()}
    weights = full_weights(model, shards, mesh)["cut"].tolist()
    return {n: g.tolist() for n, g in full_gradients(model, shards, mesh).items()}, norms, reduced, weights


def test_gradients_are_summed_and_elements_counted_once(tmp_path):
    answers = run_ranks(rank_gradients, 4, tmp_path)
    gradients, norms, reduced, weights = answers[0]
    assert answers[3][0] | {"idle": [1.0]} == gradients | {"idle": [1.0]}
    assert gradients["cut"] == [3.0, 6.0, 6.0, 12.0]  # dp sums 1 + 2; tp concatenates
    assert gradients["whole"] == [15.0]  # summed over dp, never over tp
    assert gradients["partial"] == [6.0]  # (1 + 2) over tp, twice over dp
    assert norms["cut"] == 15.0
    assert norms["whole"] == 15.0
    assert norms["partial"] == 6.0
    assert reduced == [(5,), (1,)], "a collective over dp x cp for all, and one over tp for those that are partial"
    assert weights == [1.0, 2.0, 3.0, 4.0]


def test_a_rank_without_a_gradient_takes_part_with_zeros(tmp_path):
    answers = run_ranks(rank_gradients, 4, tmp_path)
    assert [a[0]["idle"] for a in answers] == [[1.0], [0.0], [1.0], [0.0]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("source", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_a_rank_keeps_its_own_part_of_a_whole_tensor(source, sequence_parallel):
    """Gate and up in one tensor, and 19 rows of vocabulary over two ranks."""
    others = {name: torch.randn_like(whole) for name, whole in load_policy(source).model.named_parameters()}

    def check(mesh):
        policy = load_policy(source, mesh=mesh, sequence_parallel=sequence_parallel)
        for name, parameter in policy.model.named_parameters():
            assert not torch.equal(full_tensor(parameter, policy.shards[name], mesh), others[name])
            copy_local_part(parameter, others[name], policy.shards[name], mesh)
            assert torch.equal(full_tensor(parameter, policy.shards[name], mesh), others[name]), name
            assert parameter.requires_grad
            assert parameter.grad_fn is None
        return policy.model.get_input_embeddings().weight.shape[0]

    assert simulate(check, tp=2) == [10, 9]


def test_a_whole_tensor_is_a_copy():
    """The saved copy does not change with the weights."""
    model = nn.Linear(2, 2)
    mesh = make_mesh()
    whole = full_tensor(model.weight, ParameterShard(), mesh)
    with torch.no_grad():
        model.weight.zero_()
    assert whole.abs().min() > 0
    assert not whole.requires_grad


SIZES = {"tall": (7, 3), "flat": (5,), "one": (1, 3)}
"""None divides by 4 ranks; "one" leaves ranks without a row."""


class Leaf(nn.Module):
    """Parameters alone."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, size in SIZES.items():
            setattr(self, name, nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)))

    def forward(self):
        return sum((number + 1) * parameter.square().sum() for number, parameter in enumerate(self.parameters()))


def truth():
    model = Leaf()
    model().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def measured(model):
    parameters = trained_parameters(model)
    return given_norms(parameters), {name: given_gradient(p).clone() for name, p in parameters.items()}


def cut(model, mesh, placements):
    """Every parameter and its gradient as DTensors; a partial gradient is dealt so that only the sum is right."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    whole = truth()
    for name, parameter in list(model.named_parameters()):
        settled = [Replicate() if placement.is_partial() else placement for placement in placements]
        dealt = nn.Parameter(distribute_tensor(parameter.data, mesh, settled))
        gradient = distribute_tensor(whole[name], mesh, settled)
        for dim, placement in enumerate(placements):
            if placement.is_partial():
                share = (1 + mesh.get_local_rank(dim)) / sum(range(1, mesh.size(dim) + 1))
                gradient = DTensor.from_local(
                    gradient.to_local() * share,
                    mesh,
                    placements,
                    run_check=False,
                    shape=whole[name].shape,
                    stride=whole[name].stride(),
                )
        dealt.grad = gradient
        setattr(model, name, dealt)
    return model


def every_way():
    """One model in each way, on 4 ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial, Replicate, Shard

    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {
        "cut over all": cut(Leaf(), line, [Shard(0)]),
        "cut over one, repeated over the other": cut(Leaf(), square, [Replicate(), Shard(0)]),
        "cut over both": cut(Leaf(), square, [Shard(0), Shard(0)]),
        "repeated": cut(Leaf(), square, [Replicate(), Replicate()]),
        "partial": cut(Leaf(), line, [Partial()]),
        "partial over one, cut over the other": cut(Leaf(), square, [Partial(), Shard(0)]),
    }
    mixed = cut(Leaf(), line, [Shard(0)])
    mixed.flat, mixed.one = nn.Parameter(Leaf().flat.data), cut(Leaf(), square, [Replicate(), Shard(0)]).one
    mixed.flat.grad = truth()["flat"]
    sharded, hybrid = Leaf(), Leaf()
    fully_shard(sharded, mesh=line)
    fully_shard(hybrid, mesh=square)
    for model in (sharded, hybrid):
        model().backward()
    results |= {"plain beside two meshes": mixed, "FSDP2": sharded, "FSDP2, hybrid": hybrid}
    answers = {name: measured(model) for name, model in results.items()}
    lonely = cut(Leaf(), line, [Shard(0)])
    lonely.tall.grad = None
    answers["without a gradient"] = measured(lonely)
    return answers, world_axis().size


def test_every_element_counts_once_under_any_sharding(tmp_path):
    whole = truth()
    for answers, size in run_ranks(every_way, 4, tmp_path):
        assert size == 4
        norms, gradients = answers.pop("without a gradient")
        assert norms["tall"] == 0.0
        assert norms["flat"] == pytest.approx(float(whole["flat"].norm()), rel=1e-14)
        assert not gradients["tall"].any()
        for way, (norms, gradients) in answers.items():
            assert list(norms) == list(SIZES), way
            for name, gradient in whole.items():
                assert norms[name] == pytest.approx(float(gradient.norm()), rel=1e-14), f"{name}, {way}"
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-14, atol=0, msg=f"{name}, {way}")


def test_alone_there_is_nothing_to_join():
    model = Leaf()
    model.flat.requires_grad_(False)
    assert world_axis().size == 1
    assert given_norms(trained_parameters(model)) == {"tall": 0.0, "one": 0.0}
    model.one.grad = torch.tensor([[3.0, 0.0, 4.0]], dtype=torch.float64)
    assert given_norms(trained_parameters(model)) == {"tall": 0.0, "one": 5.0}


def test_a_square_beyond_float32_is_measured():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 1e25)
    assert given_norms({"w": parameter})["w"] == pytest.approx(2e25)
    assert math.isinf(float(parameter.grad.square().sum()))


def test_names_are_those_of_the_model_itself():
    inner = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": inner})})
    assert list(trained_parameters(wrapped)) == list(trained_parameters(inner))
    assert list(trained_parameters(inner)) == ["0.weight", "0.bias"]
    beside = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False), "head": nn.ModuleDict({"module": inner})})
    assert list(trained_parameters(beside)) == ["module.weight", "head.module.0.weight", "head.module.0.bias"]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_norms_of_weights_are_those_of_the_whole_model_on_every_rank(sizes):
    def norms(mesh):
        policy = load_policy("tiny-qwen3-moe", mesh=mesh, precision="float64", seed=3)
        return weight_norms(policy.model, policy.shards, mesh)

    whole = load_policy("tiny-qwen3-moe", precision="float64", seed=3).model
    expected = {name: float(value.detach().norm()) for name, value in whole.named_parameters()}
    for found in simulate(norms, **sizes):
        assert found == pytest.approx(expected, rel=1e-12)


def test_parameters_that_an_error_left_gathered_are_refused():
    net = nn.Linear(2, 1, bias=False)
    net(torch.ones(1, 2)).sum().backward()
    shards = {"weight": ParameterShard(over_dp_cp=True)}
    with pytest.raises(ShardingError, match=r"still gathered[\s\S]*load the policy again"):
        sum_gradients(net, shards, single_process_mesh())
