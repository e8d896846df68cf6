"""Adapters on a decoder: where their factors are, what they compute, and how they merge."""

import math
import re
from dataclasses import replace

import pytest
import torch
import transformers

from tests.helpers.adapters import adapter_values
from tests.helpers.bars import assert_float64_parity
from workbench.errors import SpecError
from workbench.policy.attention import with_our_attention
from workbench.policy.decoder import tiny_qwen3
from workbench.policy.lora import (
    adapter_shards,
    initial_values,
    install_lora,
    merged,
    merged_weights,
    sampler_weights,
)
from workbench.policy.lora_targets import Adapted, find_adapted
from workbench.policy.model import load_policy
from workbench.policy.sampling import Sampler
from workbench.sharding.attention import AttentionShard
from workbench.sharding.gradients import full_gradients, full_weights, sum_gradients
from workbench.sharding.mesh import single_process_mesh
from workbench.sharding.plan import ShardPlan
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import ParameterShard
from workbench.specs.lora import LoraSpec
from workbench.specs.run import RunSpec
from workbench.train.optimizer import build_optimizer

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
Q = Adapted("layer.q_proj", "weight", "layer.q_proj.weight", (8, 4), 1, 0)


def shapes_of(model):
    return {name: value.shape for name, value in model.named_parameters()}


def with_lora(source="tiny-qwen3", **settings):
    return load_policy(source, precision="float64", lora=LoraSpec(**{"r": 2, "init_lora_weights": "random"} | settings))


def test_a_layer_that_the_model_does_not_call_is_refused():
    model = tiny_qwen3(19)
    layer = model.model.layers[1].mlp
    layer.forward = lambda x: layer.act_fn(x @ layer.gate_proj.weight.T) @ layer.down_proj.weight.T
    with pytest.raises(
        SpecError, match=r"layers\.1\.mlp\.gate_proj\.weight.* which a forward of the model does not call"
    ):
        install_lora(
            with_our_attention(model),
            single_process_mesh(),
            {name: ParameterShard() for name in shapes_of(model)},
            LoraSpec(r=2),
            shapes=shapes_of(model),
        )


# ---- values and shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kaiming", "gaussian", "random"])
def test_initial_values_depend_on_seed_and_name_alone(how):
    spec = LoraSpec(r=64, init_lora_weights=how)
    each = Adapted("layer.q_proj", "weight", "layer.q_proj.weight", (32, 900), 1, 0)
    a, b = initial_values(each, spec)
    assert (a.shape, b.shape) == ((64, 900), (32, 64))
    assert torch.equal(a, initial_values(each, spec)[0])
    assert not torch.equal(a, initial_values(each, LoraSpec(r=64, init_lora_weights=how, seed=1))[0])
    assert not torch.equal(a, initial_values(replace(each, module="layer.k_proj"), spec)[0])
    bound = 1 / math.sqrt(900)
    expected = 1 / 64 if how == "gaussian" else bound / math.sqrt(3)
    assert float(a.std()) == pytest.approx(expected, rel=0.02)
    assert how == "gaussian" or float(a.abs().max()) <= bound
    assert b.any() == (how == "random")
    assert float(b.abs().max()) <= 1 / math.sqrt(64)


def test_the_factor_that_a_rank_holds_whole_has_a_partial_gradient():
    whole, cut = ParameterShard(gradient_is_partial=True), ParameterShard
    assert adapter_shards(Q, cut(0, parts=(4, 4))) == (whole, cut(0, parts=(4, 4)))
    assert adapter_shards(Q, cut(1)) == (cut(1), whole)
    assert adapter_shards(Q, whole) == (whole, whole)
    assert adapter_shards(Q, cut()) == (cut(), cut())
    head = Adapted("lm_head", "weight", "model.embed_tokens.weight", (19, 4), 1, 0, is_head=True)
    assert adapter_shards(head, cut(0, on_both_ends=True)) == (cut(), cut(0))
    experts = Adapted("mlp.experts", "down_proj", "mlp.experts.down_proj", (4, 8, 6), 2, 1)
    assert adapter_shards(experts, cut(2, over_ep=True)) == (
        cut(2, over_ep=True),
        ParameterShard(gradient_is_partial=True, over_ep=True),
    )
    assert adapter_shards(experts, cut(1))[1] == cut(1)


def test_every_layout_starts_with_the_same_values():
    def values(mesh):
        policy = load_policy("tiny-qwen3-moe", mesh=mesh, lora=LoraSpec(r=2, target_parameters=EXPERTS))
        return {n: v for n, v in full_weights(policy.model, policy.shards, mesh).items() if "lora_" in n}

    one = values(single_process_mesh())
    for layout in ({"tp": 2}, {"dp": 2, "ep": 2}):
        for other in simulate(values, **layout):
            assert other.keys() == one.keys()
            assert all(torch.equal(other[name], one[name]) for name in one)


# ---- training only adapters ------------------------------------------------------------------------------------------


def test_only_adapters_and_saved_modules_are_trained_and_optimized():
    policy = with_lora(target_modules=("q_proj",), modules_to_save=("model.norm",))
    trained = [name for name, value in policy.model.named_parameters() if value.requires_grad]
    assert trained == list(policy.lora.trained)
    assert trained == [
        *(f"model.layers.{n}.self_attn.q_proj.lora_{f}.weight" for n in range(3) for f in "AB"),
        "model.norm.weight",
    ]
    optimizer = build_optimizer(policy, RunSpec(precision="float64"))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [
        id(policy.model.get_parameter(name)) for name in trained
    ]
    assert policy.shapes["model.layers.0.self_attn.q_proj.lora_A.weight"] == (2, 64)


def test_the_names_of_weights_of_the_base_do_not_change():
    policy = with_lora()
    names = [name for name, _ in policy.model.named_parameters() if ".lora_" not in name]
    assert names == [name for name, _ in tiny_qwen3(19).named_parameters()]


# ---- merging ---------------------------------------------------------------------------------------------------------


def test_a_merge_is_in_float32_at_least_or_all_in_bfloat16():
    torch.manual_seed(0)
    weight, a, b = torch.randn(8, 4), torch.randn(2, 4), torch.randn(8, 2)
    exact = weight.double() + 1.5 * (b.double() @ a.double())
    half = [value.bfloat16() for value in (weight, a, b)]
    assert merged(Q, weight.bfloat16(), a, b, 1.5).dtype == torch.float32
    assert torch.allclose(merged(Q, weight, a, b, 1.5).double(), exact, atol=1e-5)
    assert torch.equal(merged(Q, weight.double(), a.double(), b.double(), 1.5), exact)
    rounded = merged(Q, weight, a, b, 1.5, "merged_bfloat16")
    assert torch.equal(rounded, half[0] + (half[2] @ half[1]) * 1.5)
    assert (rounded.double() - exact).norm() > (exact.bfloat16().double() - exact).norm()


def test_a_transposed_weight_gets_the_transposed_product():
    each = Adapted("c_attn", "weight", "c_attn.weight", (4, 8), 0, 1)
    a, b = torch.randn(2, 4), torch.randn(8, 2)
    assert each.factor_shapes(2) == (a.shape, b.shape)
    assert torch.equal(merged(each, torch.zeros(4, 8), a, b, 1.0), (b @ a).T)


@pytest.mark.parametrize("source", ["tiny-qwen3", "tiny-qwen3-moe"])
@pytest.mark.parametrize("how", ["merged", "unmerged"])
def test_a_sampler_of_either_kind_has_the_logits_of_the_policy(source, how):
    experts = EXPERTS if source.endswith("moe") else ()
    lora = {"target_modules": ("q_proj", "o_proj", "lm_head"), "target_parameters": experts, "sampler": how}
    policy = with_lora(source, **lora)
    weights = {name: value.detach() for name, value in policy.model.named_parameters()}
    sampler = Sampler(source, precision="float64", lora=policy.lora)
    sampler.load_weights(sampler_weights(policy.lora, weights))
    tokens = torch.tensor([[3, 12, 4, 15, 7, 1]])
    with torch.no_grad():
        expected = merged_by_hand(source, policy)(input_ids=tokens).logits
        assert torch.allclose(sampler.model(input_ids=tokens).logits, expected, rtol=0, atol=1e-12)
        plain = Sampler(source, precision="float64").model(input_ids=tokens).logits
    assert not torch.allclose(plain, expected, atol=0.1), "the adapters matter"


def merged_by_hand(source, policy):
    model = Sampler(source, precision="float64", tied=False).model
    named = {name: value.detach() for name, value in policy.model.named_parameters()}
    for name, value in model.named_parameters():
        base = named.get(name, named["model.embed_tokens.weight"])
        module, _, parameter = name.rpartition(".")
        if (a := named.get(f"{module}.lora_A.{parameter}")) is not None:
            base = base + named[f"{module}.lora_B.{parameter}"] @ a
        value.copy_(base)
    return model


def test_merging_unties_a_tied_head_alone():
    policy = with_lora(target_modules=("lm_head",))
    weights = {name: value.detach() for name, value in policy.model.named_parameters()}
    result = merged_weights(policy.lora, weights)
    assert torch.equal(result["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert not torch.equal(result["lm_head.weight"], result["model.embed_tokens.weight"])
    assert not [name for name in result if re.search("lora_", name)]


def test_values_of_another_rank_are_named():
    model = tiny_qwen3(19)
    values = {}
    for name, (a, b) in adapter_values(model, 3, seed=0).items():
        stem = name.removesuffix(".weight")
        values |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    with pytest.raises(SpecError, match=r"lora_A\.weight of \(3, 64\)\n.*rank 2 and a weight of \(64, 64\)"):
        install_lora(
            model,
            single_process_mesh(),
            {name: ParameterShard() for name in shapes_of(model)},
            LoraSpec(r=2),
            shapes=shapes_of(model),
            values=values,
        )


# ---- other architectures over tp -------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
KINDS = {
    "OPT": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},  # biases; layers of a decoder layer
    "GPT2": {"n_layer": 1, "n_head": 4, "n_embd": 32},  # three in one, transposed
    "Phi3": SIZES | {"num_key_value_heads": 2},  # outputs gathered, inputs split again
    "Qwen2Moe": SIZES
    | {"num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_other_architectures_are_the_same_over_tp(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(vocab_size=19, pad_token_id=None, bos_token_id=None, **KINDS[kind])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path / kind)

    def gradients(mesh, **more):
        spec = LoraSpec(r=2, init_lora_weights="random", target_modules=".*")
        policy = load_policy(kind, project=tmp_path, precision="float64", mesh=mesh, lora=spec, **more)
        tokens, places = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.arange(8)
        plan = ShardPlan.make("contiguous", num_tokens=8, cp=1)
        hidden = policy.hidden_states(tokens, places, AttentionShard.make(plan, places * 0, mesh["cp"]))
        (policy.token_logprobs(hidden, tokens.flip(0)).logprobs_T * torch.linspace(-1, 2, 8)).sum().backward()
        sum_gradients(policy.model, policy.shards, mesh)
        return full_gradients(policy.model, policy.shards, mesh)

    expected = gradients(single_process_mesh())
    assert all(value.any() for value in expected.values())
    assert len(expected) == 2 * len(find_adapted(model, LoraSpec(r=2, target_modules=".*"), shapes_of(model)))
    for more in ({}, {"sequence_parallel": True}) if kind != "GPT2" else ({},):  # which reshapes by tokens
        for actual in simulate(lambda mesh, more=more: gradients(mesh, **more), tp=2):
            assert_float64_parity(actual, expected, context=f"{kind}, {more}")
