"""Experts on several ranks, simulated: the same outputs and gradients as one rank that has all of them."""

import copy

import pytest
import torch
from torch import nn

from workbench.errors import ShardingError
from workbench.policy.decoder import tiny_qwen3_moe
from workbench.sharding.expert_parallel import apply_expert_parallel, expert_modules
from workbench.sharding.gradients import copy_local_part, full_gradients, full_weights, gradient_norms, sum_gradients
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import ParameterShard

EXPERTS, SIZE, CHOICES = 4, 6, 2


class Mixture(nn.Module):
    """One expert after another, token by token."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, SIZE, generator=draw, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(EXPERTS, SIZE, 8, generator=draw, dtype=torch.float64))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        rows = []
        for token, chosen, gates in zip(hidden_states, top_k_index.tolist(), top_k_weights, strict=True):
            parts = [
                gate * (self.down[e] @ torch.tanh(self.up[e] @ token)) for e, gate in zip(chosen, gates, strict=True)
            ]
            rows.append(torch.stack(parts).sum(0))
        return torch.stack(rows) if rows else torch.zeros_like(hidden_states)


class Model(nn.Module):
    """A router, a mixture, and nothing else."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.router = nn.Parameter(torch.randn(EXPERTS, SIZE, generator=draw, dtype=torch.float64))
        self.experts = Mixture()

    def forward(self, hidden):
        gates, chosen = (hidden @ self.router.T).softmax(-1).topk(CHOICES)
        return self.experts(hidden, chosen, gates)


def tokens_of(rank, lonely=False):
    """Tokens of a rank, as many as its number and one more; ``lonely``: all of one kind, which chooses two experts."""
    draw = torch.Generator().manual_seed(10 + rank * (not lonely))
    hidden = torch.randn(1 if lonely else rank + 1, SIZE, generator=draw, dtype=torch.float64)
    return hidden.requires_grad_()


def loss_of(model, hidden):
    return (model(hidden) * torch.arange(SIZE)).square().sum()


def on_ranks(mesh, lonely):
    model = Model()
    shards = {name: ParameterShard() for name, _ in model.named_parameters()}
    shards = apply_expert_parallel(model, shards, mesh["ep"])
    hidden = tokens_of(mesh["dp_cp"].rank, lonely)
    loss_of(model, hidden).backward()
    sum_gradients(model, shards, mesh)
    whole = full_weights(model, shards, mesh)
    restored = copy.deepcopy(dict(model.named_parameters()))
    for name, value in restored.items():
        value.data.zero_()
        copy_local_part(value, whole[name], shards[name], mesh)
        torch.testing.assert_close(value, model.get_parameter(name), rtol=0, atol=0)
    return {
        "experts": model.experts.up.shape[0],
        "hidden": hidden.grad,
        "gradients": full_gradients(model, shards, mesh),
        "norms": gradient_norms(model, shards, mesh),
        "weights": whole,
    }


@pytest.mark.parametrize("lonely", [False, True])
@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"cp": 4, "ep": 4}, {"dp": 2, "cp": 2, "ep": 2}])
def test_outputs_and_gradients_are_those_of_one_rank_with_all_experts(sizes, lonely):
    ranks = simulate(lambda mesh: on_ranks(mesh, lonely), **sizes)
    model = Model()
    hidden = [tokens_of(rank, lonely) for rank in range(len(ranks))]
    sum(loss_of(model, each) for each in hidden).backward()
    for answer, own in zip(ranks, hidden, strict=True):
        assert answer["experts"] == EXPERTS // sizes["ep"]
        torch.testing.assert_close(answer["hidden"], own.grad, rtol=1e-12, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(answer["gradients"][name], parameter.grad, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(answer["weights"][name], parameter.detach(), rtol=0, atol=0)
            assert answer["norms"][name] == pytest.approx(float(parameter.grad.norm()), rel=1e-12)


def test_mixtures_are_recognised_and_routers_are_not():
    names = list(expert_modules(tiny_qwen3_moe(19)))
    assert names == ["model.layers.0.mlp.experts", "model.layers.2.mlp.experts"]


def test_what_cannot_be_shared_is_refused():
    dense, axis = nn.Linear(2, 2), Axis("ep", size=3)
    with pytest.raises(ShardingError, match="no mixture of experts") as caught:
        apply_expert_parallel(dense, {}, axis)
    assert "leave layout.ep out" in str(caught.value)
    model = Model()
    with pytest.raises(ShardingError, match="4 experts in experts"):
        apply_expert_parallel(model, {name: ParameterShard() for name, _ in model.named_parameters()}, axis)
    assert apply_expert_parallel(dense, {"weight": ParameterShard()}, Axis("ep")) == {"weight": ParameterShard()}
