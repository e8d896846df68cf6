from dataclasses import replace

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeTopKRouter

from workbench.errors import SpecError
from workbench.policy.decoder import tiny_qwen3, tiny_qwen3_moe
from workbench.policy.model import load_policy
from workbench.policy.precision import _EXACT_ROUTERS
from workbench.policy.routers import NO_ROUTE, Routes, install_routers, replayed_gates
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan
from workbench.specs.precision import PRESETS

SIZES = {"hidden_size": 12, "num_experts_per_tok": 3}
ROUTERS = {
    "softmax": (Qwen2MoeTopKRouter, Qwen2MoeConfig(num_experts=8, norm_topk_prob=False, **SIZES)),
    "softmax_to_1": (MixtralTopKRouter, MixtralConfig(num_local_experts=8, **SIZES)),
    "sigmoid": (
        DeepseekV3TopkRouter,
        DeepseekV3Config(n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=2.5, **SIZES),
    ),
    "softmax_of_chosen": (GptOssTopKRouter, GptOssConfig(num_local_experts=8, **SIZES)),
}


def made(name):
    kind, config = ROUTERS[name]
    router = kind(config)
    for values in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(values)
    return router


@pytest.mark.parametrize("name", ROUTERS)
def test_gates_of_its_own_choice_are_those_of_the_router(name):
    router, hidden = made(name), torch.randn(20, 12)
    logits, gates, experts = router(hidden)
    assert torch.equal(replayed_gates(router, logits, experts).to(gates.dtype), gates)


@pytest.mark.parametrize("name", ROUTERS)
def test_float64_router_is_the_stock_one(name):
    router, hidden = made(name), torch.randn(20, 12)
    _, gates, experts = router(hidden)
    router.double()
    logits, exact, chosen = _EXACT_ROUTERS[type(router).__name__](router, hidden.double())
    order, exact_order = experts.argsort(dim=1), chosen.argsort(dim=1)
    assert torch.equal(experts.gather(1, order), chosen.gather(1, exact_order))
    torch.testing.assert_close(gates.gather(1, order).double(), exact.gather(1, exact_order), rtol=1e-5, atol=1e-6)
    assert exact.dtype == torch.float64
    assert len({*logits.flatten().tolist()} - {*logits.float().flatten().tolist()}) > 9


@pytest.mark.parametrize("name", ROUTERS)
def test_gates_of_other_experts_by_hand_and_with_a_gradient(name):
    router, logits = made(name), torch.randn(1, 8, dtype=torch.float64, requires_grad=True)
    experts, (a, b, c) = torch.tensor([[5, 0, 6]]), logits[0, [5, 0, 6]]
    gates = replayed_gates(router, logits, experts)[0]
    together = torch.stack([a, b, c])
    expected = {
        "softmax": together.exp() / logits.exp().sum(),
        "softmax_to_1": together.exp() / together.exp().sum(),
        "softmax_of_chosen": together.exp() / together.exp().sum(),
        "sigmoid": 2.5 / (1 + (-together).exp()) / (1 / (1 + (-together).exp())).sum(),
    }[name]
    torch.testing.assert_close(gates, expected, rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(gates[0], logits)
    assert gradient[0, 5] > 0
    assert gradient[0, 0] < 0
    assert (abs(gradient[0, 1]) < 1e-15) == (name != "softmax")


def test_replayed_routes_of_one_pass_do_not_reach_the_next():
    model = tiny_qwen3_moe(19)
    routers = install_routers(model)
    assert (len(routers.names), routers.experts, routers.chosen) == (2, 4, 2)
    tokens, counted = torch.tensor([[1, 2, 3]]), torch.ones(3, dtype=torch.bool)
    with torch.no_grad():
        stock = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        own = Routes(counted)
        model.model(input_ids=tokens, use_cache=False, routes=own)
        given = torch.stack([own.noted[layer].taken_tk for layer in range(2)], dim=1)
        other = given.clone()
        other[1, 0] = (other[1, 0] + 1) % 4
        replayed, partly = Routes(counted, other), Routes(counted, given.clone())
        partly.given_tLk[2] = NO_ROUTE
        changed = model.model(input_ids=tokens, use_cache=False, routes=replayed).last_hidden_state
        same = model.model(input_ids=tokens, use_cache=False, routes=partly).last_hidden_state
        after = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert torch.equal(stock, after)
    assert torch.equal(stock, same)
    assert torch.allclose(changed[0, 0], stock[0, 0])
    assert not torch.allclose(changed[0, 1], stock[0, 1])
    assert torch.equal(replayed.noted[0].taken_tk, other[:, 0])
    assert torch.equal(replayed.noted[0].own_tk, given[:, 0])


def test_experts_are_grouped_gemms_except_in_float64():
    tokens, places = torch.arange(9), torch.arange(9)
    shard = AttentionShard.make(ShardPlan.make("contiguous", num_tokens=9, cp=1), torch.zeros(9).long(), Axis("cp"))
    policy, exact = (load_policy("tiny-qwen3-moe", precision=precision) for precision in ("float32", "float64"))
    names = [one.model.config._experts_implementation for one in (policy, exact)]
    assert names == ["grouped_mm", "eager"]
    with torch.no_grad():
        grouped = policy.hidden_states(tokens, places, shard)
        policy.model.set_experts_implementation("eager")
        torch.testing.assert_close(grouped, policy.hidden_states(tokens, places, shard), rtol=1e-5, atol=1e-5)


def test_logits_of_a_router_of_higher_precision_are_noted_in_it():
    dtypes = replace(PRESETS["bfloat16"], router="float32")
    tokens, counted = torch.arange(9), torch.ones(9, dtype=torch.bool)
    shard = AttentionShard.make(ShardPlan.make("contiguous", num_tokens=9, cp=1), torch.zeros(9).long(), Axis("cp"))
    for precision, expected in (("bfloat16", torch.bfloat16), (dtypes, torch.float32)):
        policy, routes = load_policy("tiny-qwen3-moe", precision=precision, routing=True), Routes(counted)
        with torch.no_grad(), policy.in_compute_dtype():
            assert policy.hidden_states(tokens, tokens, shard, routes=routes).dtype == torch.bfloat16
        assert {noted.logits_tE.dtype for noted in routes.noted.values()} == {expected}


def test_a_model_without_routers_and_unknown_routers_are_refused():
    with pytest.raises(SpecError, match="no router of experts"):
        install_routers(tiny_qwen3(19))
    model = tiny_qwen3_moe(19)
    model.model.layers[0].mlp.gate.__class__ = type("NewRouter", (type(model.model.layers[0].mlp.gate),), {})
    with pytest.raises(SpecError, match="routes of a model with NewRouter"):
        install_routers(model)
