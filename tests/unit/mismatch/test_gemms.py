import torch

from workbench.mismatch.gemms import use_gemms
from workbench.policy.decoder import load_decoder


def on_grid(row, scale):
    """True if every value is one of e4m3 times the scale."""
    codes = (row / scale).to(torch.float8_e4m3fn).float()
    return torch.allclose(codes * scale, row, rtol=1e-6)


def test_weights_alone_are_on_the_grid_of_their_channel_and_the_head_stays():
    model, plain = load_decoder("tiny-qwen3", tied=False), load_decoder("tiny-qwen3", tied=False)
    use_gemms(model, "fp8_weights_rowwise")
    weight, old = model.model.layers[0].mlp.up_proj.weight.data, plain.model.layers[0].mlp.up_proj.weight.data
    assert not torch.equal(weight, old)
    assert all(on_grid(row, before.abs().max() / 448) for row, before in zip(weight, old, strict=True))
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)


def test_experts_are_rounded_one_by_one():
    model, plain = load_decoder("tiny-qwen3-moe"), load_decoder("tiny-qwen3-moe")
    use_gemms(model, "fp8_weights_tensorwise")
    weight, old = (m.model.layers[0].mlp.experts.down_proj.data for m in (model, plain))
    assert all(on_grid(one, before.abs().max() / 448) for one, before in zip(weight, old, strict=True))


def test_both_operands_are_rounded_and_dense_changes_nothing():
    tokens = torch.tensor([[1, 5, 2, 8]])
    with torch.no_grad():
        plain = load_decoder("tiny-qwen3")(tokens).logits
        assert torch.equal(use_gemms(load_decoder("tiny-qwen3"), "dense")(tokens).logits, plain)
        both = use_gemms(load_decoder("tiny-qwen3"), "fp8_rowwise")(tokens).logits
        weights = use_gemms(load_decoder("tiny-qwen3"), "fp8_weights_rowwise")(tokens).logits
    assert 0 < (weights - plain).abs().mean() < (both - plain).abs().mean()
