import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from workbench.policy.model import load_policy
from workbench.sharding import collectives
from workbench.sharding.gradients import (
    copy_local_part,
    full_gradients,
    full_tensor,
    full_weights,
    gradient_norms,
    sum_gradients,
)
from workbench.sharding.mesh import make_mesh
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


def test_sums_once_and_counts_every_element_once(tmp_path):
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
    """What is kept of it does not change with the weights."""
    model = nn.Linear(2, 2)
    mesh = make_mesh()
    whole = full_tensor(model.weight, ParameterShard(), mesh)
    with torch.no_grad():
        model.weight.zero_()
    assert whole.abs().min() > 0
    assert not whole.requires_grad
