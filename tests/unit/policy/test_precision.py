import copy

import pytest
import torch
from torch import nn

from tests.helpers.mixtures import save_tiny_glm4_moe
from workbench.errors import SpecError
from workbench.policy.decoder import load_decoder, tiny_qwen3, tiny_qwen3_moe
from workbench.policy.precision import cast, lift_to_float64


def test_norms_and_rotary_keep_float64_digits():
    model = lift_to_float64(tiny_qwen3(19))
    x = torch.randn(2, 64, dtype=torch.float64)
    norm = model.model.norm
    expected = x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-15, atol=1e-15)
    cos, _ = model.model.rotary_emb(x, torch.tensor([[0, 1000]]))
    assert cos.dtype == torch.float64
    assert cos[0, 1, 0].item() == pytest.approx(torch.cos(torch.tensor(1000.0, dtype=torch.float64)).item(), abs=1e-15)


def test_rotary_keeps_the_scaling_of_its_attention():
    rotary = lift_to_float64(tiny_qwen3(19)).model.rotary_emb
    rotary.attention_scaling = 1.5  # set by yarn; it is 1 in the default type
    cos, sin = rotary(torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[0, 7]]))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, 2.25), rtol=0, atol=1e-14)


def test_a_copy_of_a_lifted_model_trains_its_own_norms():
    model = lift_to_float64(tiny_qwen3(19))
    twin = copy.deepcopy(model)
    twin(input_ids=torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    assert all(float(p.grad.norm()) > 0 for name, p in twin.named_parameters() if "norm" in name)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("normalised", [True, False])
def test_routers_and_experts_keep_float64_digits(normalised):
    model = tiny_qwen3_moe(19)
    model.model.layers[0].mlp.gate.norm_topk_prob = normalised
    mixture = lift_to_float64(model).model.layers[0].mlp
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    expected = torch.softmax(x[0] @ mixture.gate.weight.T, -1).sort(-1, descending=True)
    largest = expected.values[:, :2] / (expected.values[:, :2].sum(-1, keepdim=True) if normalised else 1)
    _, weights, chosen = mixture.gate(x)
    torch.testing.assert_close(weights, largest, rtol=1e-14, atol=0)
    assert torch.equal(chosen, expected.indices[:, :2])
    assert mixture(x).dtype == torch.float64


def test_rotary_frequencies_match_a_checkpoint_loaded_in_bfloat16(tmp_path):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tiny_qwen3(19).save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = cast(tiny_qwen3(19), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    asked = torch.zeros(1), torch.tensor([[0, 7, 500]])
    for ours, theirs in zip(model.model.rotary_emb(*asked), stock.model.rotary_emb(*asked), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(cast(model, torch.float32).model.rotary_emb.inv_freq, tiny_qwen3(19).model.rotary_emb.inv_freq)


def test_biases_of_routers_keep_their_dtype_in_bfloat16(tmp_path):
    """Balancing moves them by about 1e-3, which is lost next to 1 in bfloat16."""
    model = cast(load_decoder(save_tiny_glm4_moe(tmp_path)), torch.bfloat16)
    assert {b.dtype for name, b in model.named_buffers() if name.endswith("correction_bias")} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


class OddNorm(nn.Module):
    pass


class OddRouter(nn.Module):
    pass


def test_an_unknown_norm_is_refused_by_name():
    with pytest.raises(SpecError, match="OddNorm at 0"):
        lift_to_float64(nn.Sequential(OddNorm()))


def test_an_unknown_router_is_refused_by_name():
    with pytest.raises(SpecError, match="OddRouter at 0"):
        lift_to_float64(nn.Sequential(OddRouter()))
