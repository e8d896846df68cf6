import json

import pytest
import torch
from safetensors.torch import save_file

from workbench.errors import RecordError
from workbench.mismatch.adapters import add_updates, apply_adapter, read_adapter
from workbench.policy.decoder import load_decoder

NAME = "model.layers.0.self_attn.q_proj"
TOKENS = torch.tensor([[1, 5, 2, 8]])


def write(folder, *, name=NAME, **config):
    generator = torch.Generator().manual_seed(0)
    factors = {"A": torch.randn(2, 64, generator=generator), "B": torch.randn(64, 2, generator=generator)}
    save_file(
        {f"base_model.model.{name}.lora_{k}.weight": v for k, v in factors.items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6, **config}))
    return factors


def logits(adapter, mode):
    with torch.no_grad():
        return add_updates(apply_adapter(load_decoder("tiny-qwen3"), adapter, mode, torch.float32))(TOKENS).logits


def test_each_way_is_the_weight_it_says(tmp_path):
    factors = write(tmp_path)
    adapter, update = read_adapter(tmp_path), factors["B"] @ factors["A"]
    for mode, scale in {
        "unmerged": 3,
        "merged": 3,
        "dropped": 0,
        "doubled": 6,
        "times_alpha": 6,
        "unscaled": 1,
    }.items():
        model = load_decoder("tiny-qwen3")
        model.get_submodule(NAME).weight.data += scale * update
        with torch.no_grad():
            expected = model(TOKENS).logits
        assert torch.allclose(logits(adapter, mode), expected, atol=2e-4), mode
    assert adapter.scale_of("rslora") == pytest.approx(6 / 2**0.5)


def test_rslora_of_the_configuration_is_read(tmp_path):
    write(tmp_path, use_rslora=True)
    adapter = read_adapter(tmp_path)
    assert (adapter.scale, adapter.scale_of("rslora")) == (pytest.approx(6 / 2**0.5), 3.0)


def test_a_merge_of_rounded_weights_rounds_twice(tmp_path):
    factors = write(tmp_path)
    adapter = read_adapter(tmp_path)
    weights = {}
    for mode in ("merged", "merged_rounded"):
        model = apply_adapter(load_decoder("tiny-qwen3"), adapter, mode, torch.bfloat16)
        weights[mode] = model.get_submodule(NAME).weight.to(torch.bfloat16)
    assert not torch.equal(weights["merged"], weights["merged_rounded"])
    up_Or, down_rI = (factors[name].to(torch.bfloat16) for name in "BA")
    whole_OI = load_decoder("tiny-qwen3").get_submodule(NAME).weight.detach().to(torch.bfloat16)
    assert torch.equal(weights["merged_rounded"], whole_OI + adapter.scale * (up_Or @ down_rI))


@pytest.mark.parametrize(
    ("config", "message"),
    [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"), ({"r": "two"}, "ValueError")],
)
def test_what_is_not_plain_lora_is_refused(tmp_path, config, message):
    write(tmp_path, **config)
    with pytest.raises(RecordError, match=message):
        read_adapter(tmp_path)


def test_a_layer_that_the_model_lacks_is_named(tmp_path):
    write(tmp_path, name="model.layers.9.self_attn.q_proj")
    with pytest.raises(RecordError, match=r"layers\.9"):
        logits(read_adapter(tmp_path), "merged")
    with pytest.raises(RecordError, match="FileNotFoundError"):
        read_adapter(tmp_path / "none")
