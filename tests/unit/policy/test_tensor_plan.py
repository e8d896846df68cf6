"""A decoder sharded over two ranks has the unsharded one's log-probabilities and gradients, or raises an error."""

import pytest
import torch
import transformers

from tests.helpers.bars import assert_float64_parity
from tests.helpers.ranks import run_ranks
from workbench.errors import SpecError
from workbench.policy import tensor_plan as plans
from workbench.policy.decoder import tiny_qwen3, tiny_qwen3_moe
from workbench.policy.model import load_policy
from workbench.sharding.attention import AttentionShard
from workbench.sharding.gradients import full_gradients, sum_gradients
from workbench.sharding.mesh import make_mesh
from workbench.sharding.plan import ShardPlan

GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS = {
    "OPT": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},  # no plan; layers of a decoder layer; positions
    "GPT2": GPT2,  # no plan; three in one, transposed
    "HunYuanDenseV1": SIZES | {"head_dim": 8},  # no plan; norms on local heads
    "Phi3": SIZES,  # gathered and split again
    "Qwen2Moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 24},  # an expert that the plan leaves whole
}
REFUSED = {"BitNet": SIZES}  # no plan; norms over features that are cut


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small checkpoints of several architectures, biases that are not zero among their weights."""
    where = tmp_path_factory.mktemp("checkpoints")
    transformers.utils.logging.disable_progress_bar()
    for kind, sizes in (KINDS | REFUSED).items():
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=19, pad_token_id=None, bos_token_id=None, eos_token_id=None, **sizes
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(where / kind)
    return where


def gradients(kind, folder, tp, sharded):
    """Log-probabilities of a row of two documents, and gradients of two passes over it; or the refusal."""
    mesh = make_mesh(tp=tp)
    try:
        policy = load_policy(kind, project=folder, precision="float64", mesh=mesh, sequence_parallel=sharded)
    except SpecError as refused:
        return str(refused), None
    tokens, documents = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]), torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    shard = AttentionShard.make(ShardPlan.make("contiguous", num_tokens=8, cp=1), documents, mesh["cp"])
    for weight in (1.0, -0.3):
        hidden = policy.hidden_states(tokens, positions, shard)
        logprobs = policy.token_logprobs(hidden, tokens.flip(0)).logprobs_T
        (logprobs * torch.linspace(-1, 2, 8) * weight).sum().backward()
    sum_gradients(policy.model, policy.shards, mesh)
    return logprobs.detach(), full_gradients(policy.model, policy.shards, mesh)


def all_of_them(folder, tp):
    return {
        (kind, sharded): gradients(kind, folder, tp, sharded)
        for kind in KINDS | REFUSED
        for sharded in ((False, True) if tp > 1 else (False,))
    }


def test_a_cut_decoder_is_the_whole_one_or_is_refused(folder, tmp_path):
    whole = all_of_them(folder, 1)
    for result in run_ranks(all_of_them, 2, tmp_path, folder, 2):
        assert "tensor parallelism of model type 'bitnet' over tp=2" in result.pop(("BitNet", False))[0]
        assert "over tp=2 with sequence_parallel" in result.pop(("BitNet", True))[0]
        assert "do: leave sequence_parallel out" in result.pop(("GPT2", True))[0]  # views by the shape of the row
        for (kind, sharded), (logprobs, of_kind) in result.items():
            expected_logprobs, expected = whole[kind, False]
            torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-12)
            assert_float64_parity(of_kind, expected, context=f"{kind}, tokens {'sharded' if sharded else 'whole'}")


def wrongly_planned(folder):
    """GPT-2 whose three projections are sharded as if they were one: shapes fit, numbers do not."""
    plans.NAMES["c_attn"] = "colwise"
    return gradients("GPT2", folder, 2, False)[0]


def test_a_wrong_plan_is_detected_by_measurement(folder, tmp_path):
    for text in run_ranks(wrongly_planned, 2, tmp_path, folder):
        assert "hidden states off by" in text
        assert "rule: sharded and unsharded model give the same hidden states" in text


def test_lines_for_layers_that_a_model_lacks_are_left_out():
    dense, mixture = plans.tensor_plan(tiny_qwen3(19)), plans.tensor_plan(tiny_qwen3_moe(19))
    assert "model.layers.*.mlp.down_proj" in dense.keys() & mixture.keys()
    assert mixture["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    sparse = tiny_qwen3_moe(19)
    del sparse.model.layers[1]
    assert mixture.keys() - plans.tensor_plan(sparse).keys() == {
        f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")
    }


def test_a_model_without_a_plan_is_planned_by_the_names_of_its_layers():
    model = tiny_qwen3(19)
    own = plans.tensor_plan(model)
    model.config.base_model_tp_plan = None
    ours = plans.tensor_plan(model)
    assert ours["model.layers.2.self_attn.o_proj"] == own["model.layers.*.self_attn.o_proj"] == "rowwise"
    assert len(ours) == 3 * 7
    model.model.layers[0].mlp.strange = torch.nn.Linear(2, 2)
    with pytest.raises(SpecError) as caught:
        plans.tensor_plan(model)
    assert str(caught.value).splitlines()[:2] == [
        "tensor parallelism of model type 'qwen3'",
        "  found: no plan, and layers named strange",
    ]
