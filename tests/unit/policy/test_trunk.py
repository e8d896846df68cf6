"""Layers that are computed again in backward, and heads as units of their own."""

import functools

import pytest
import torch

from workbench.errors import SpecError
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.model import load_policy
from workbench.policy.trunk import Head, Trunk, checkpoint_layers, decoder_layers
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis, single_process_mesh
from workbench.sharding.plan import ShardPlan
from workbench.sharding.simulated import simulate


def test_layers_are_checkpointed_where_the_last_stage_has_the_head_alone():
    """A refusal on that rank alone would leave the others waiting for it."""

    def load(mesh):
        policy = load_policy("tiny-qwen3", mesh=mesh, checkpointing=True)
        return sum(type(layer.forward) is functools.partial for layer in decoder_layers(policy.model))

    layers = load(single_process_mesh())
    assert simulate(load, pp=layers + 1) == [1] * layers + [0]


def test_checkpointing_computes_layers_again_and_changes_no_bit():
    plan = ShardPlan.make("contiguous", num_tokens=5, cp=1)
    shard = AttentionShard.make(plan, torch.zeros(5, dtype=torch.int64), Axis("cp"))
    tokens, result = torch.tensor([3, 1, 4, 1, 5]), []
    for checkpointing in (False, True):
        policy, calls = load_policy("tiny-qwen3", seed=1, checkpointing=checkpointing), []
        for layer in policy.model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.numel()) or x, lambda x: x):
            hidden = policy.hidden_states(tokens, torch.arange(5), shard)
        hidden.square().sum().backward()
        result.append(
            (hidden, [p.grad for p in policy.model.parameters() if p.grad is not None], len(calls), sum(kept))
        )
    plain, again = result
    assert (plain[2], again[2]) == (3, 6)
    assert again[3] < plain[3] / 4
    assert torch.equal(plain[0], again[0])
    assert len(plain[1]) == len(again[1]) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))


def test_checkpointing_without_layers_is_refused():
    class Bare(torch.nn.Linear):
        base_model = torch.nn.Linear(1, 1)
        config = tiny_qwen3(19).config

    with pytest.raises(SpecError, match=r"layout\.checkpointing with model type 'qwen3'"):
        checkpoint_layers(Bare(1, 1))


def test_a_head_is_apart_if_it_shares_no_parameter():
    assert Head.apart(tiny_qwen3(19, tied=True)) is None
    untied = tiny_qwen3(19, tied=False)
    assert [id(one) for one in Head.apart(untied).parameters()] == [id(untied.lm_head.weight)]


def test_hidden_states_pass_a_head_with_their_gradient_and_as_no_view():
    model = tiny_qwen3(19, tied=False)
    inputs = {"input_ids": torch.tensor([[3, 1, 4]]), "use_cache": False}
    hidden, passed = (Trunk(model, None, head)(**inputs).last_hidden_state for head in (None, Head.apart(model)))
    assert torch.equal(hidden, passed)
    assert passed._base is None
    gradients = [
        torch.autograd.grad(each.square().sum(), model.model.embed_tokens.weight)[0] for each in (hidden, passed)
    ]
    assert torch.equal(*gradients)
    assert gradients[0].any()
