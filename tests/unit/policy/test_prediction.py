"""Layers that predict further tokens: weights of checkpoints, the layers of transformers, and refusals by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.mixtures import save_tiny_glm4_moe
from workbench.errors import SpecError
from workbench.policy.decoder import load_decoder, tiny_qwen3
from workbench.policy.model import load_policy
from workbench.policy.prediction import add_prediction
from workbench.sharding.attention import AttentionShard
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


LAYERS = 46
"""Of GLM-4.5-Air: `transformers` tells a layer that predicts further tokens by its number in the published sizes."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A GLM-4-MoE whose 47th layer, in the names of its publisher, predicts a further token."""
    folder = Path(save_tiny_glm4_moe(tmp_path_factory.mktemp("glm"), layers=LAYERS, dense=LAYERS - 1))
    weights = load_file(folder / "model.safetensors")
    g = torch.Generator().manual_seed(5)

    def drawn(tensor):
        return (0.2 * torch.randn(tensor.shape, generator=g)).to(tensor.dtype) + tensor.float().mean()

    last = {name: value for name, value in weights.items() if name.startswith("model.layers.45.")}
    added = {name.replace("layers.45.", "layers.46."): drawn(value) for name, value in last.items()}
    added |= {f"model.layers.46.{name}.weight": 1 + drawn(torch.zeros(32)) for name in ("enorm", "hnorm")}
    added |= {"model.layers.46.shared_head.norm.weight": 1 + drawn(torch.zeros(32))}
    added |= {"model.layers.46.eh_proj.weight": drawn(torch.zeros(32, 64))}
    added |= {"model.layers.46.embed_tokens.weight": weights["model.embed_tokens.weight"].clone()}
    added |= {"model.layers.46.shared_head.head.weight": weights["lm_head.weight"].clone()}
    save_file(weights | added, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("num_nextn_predict_layers", None)
    (folder / "config.json").write_text(json.dumps(settings | {"num_mtp_layers": 1}))
    return str(folder), added


def test_weights_are_those_of_the_checkpoint(checkpoint):
    folder, added = checkpoint
    policy = load_policy(folder, depths=1)
    (layer,) = policy.model.model.prediction
    for name in ("enorm", "hnorm", "eh_proj"):
        assert torch.equal(getattr(layer, name).weight, added[f"model.layers.46.{name}.weight"])
    assert torch.equal(layer.post_norm.weight, added["model.layers.46.shared_head.norm.weight"])
    assert torch.equal(layer.mtp_block.self_attn.q_proj.weight, added["model.layers.46.self_attn.q_proj.weight"])
    gate_up = torch.cat([added[f"model.layers.46.mlp.experts.1.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(layer.mtp_block.mlp.experts.gate_up_proj[1], gate_up)
    bias = added["model.layers.46.mlp.gate.e_score_correction_bias"]
    assert torch.equal(layer.mtp_block.mlp.gate.e_score_correction_bias, bias)


def test_hidden_states_are_those_of_transformers(checkpoint):
    """One document, by the layers that `transformers` drafts tokens with."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    folder, _ = checkpoint
    main = load_decoder(folder).eval()
    theirs = MtpModel.from_pretrained(main).eval()
    length = len(TOKENS)
    with torch.no_grad():
        last = main.model(input_ids=TOKENS[None], use_cache=False).last_hidden_state
        expected_TD = theirs.forward_layer(
            0,
            last[:, :-1],
            torch.arange(1, length)[None],
            MtpCache(config=main.config.get_mtp_config()),
            input_ids=TOKENS[None, 1:],
        )[0]
    policy = load_policy(folder, depths=1)
    places_T = torch.arange(length)
    plan = ShardPlan.make("contiguous", num_tokens=length, cp=1)
    shard = AttentionShard.make(plan, torch.zeros_like(places_T), Axis("cp"), kernel="plain")
    ahead_T1 = torch.cat([TOKENS[1:], torch.tensor([-1])])[:, None]
    with torch.no_grad():
        hidden_TD = policy.hidden_states(TOKENS, places_T, shard)
        (depth_TD,) = policy.predicted_hidden_states(hidden_TD, ahead_T1, places_T, shard)
    torch.testing.assert_close(depth_TD[:-1], expected_TD, rtol=1e-5, atol=1e-5)
    assert float(expected_TD.norm()) > 1


def test_a_checkpoint_without_enough_layers_is_refused(checkpoint, tmp_path):
    folder, _ = checkpoint
    with pytest.raises(SpecError, match=r"(?s)prediction.depths.*1 such layers in the checkpoint.*take depths: 1"):
        load_policy(folder, depths=2)
    with pytest.raises(SpecError, match=r"(?s)0 such layers in the checkpoint.*leave prediction out"):
        load_policy(save_tiny_glm4_moe(tmp_path / "without"), depths=1)
    with pytest.raises(SpecError, match=r"(?s)1, layers that predict several tokens.*prediction.depths"):
        load_policy(folder)


def test_layers_of_a_tiny_model_are_drawn_from_its_seed():
    before = torch.random.get_rng_state()
    one, same, other = (load_policy("tiny-qwen3", depths=2, seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    names = [name for name in one if ".prediction." in name]
    assert len(names) == 2 * 15
    assert all(torch.equal(one[name], same[name]) for name in names)
    drawn = [name for name in names if "norm" not in name]
    assert all(not torch.equal(one[name], other[name]) for name in drawn)
    first, second = "model.prediction.0.eh_proj.weight", "model.prediction.1.eh_proj.weight"
    assert not torch.equal(one[first], one[second])
    plain = tiny_qwen3(19, seed=1).state_dict()
    assert all(torch.equal(one[name], value) for name, value in plain.items())


def test_a_decoder_that_scales_its_embeddings_is_refused():
    model = tiny_qwen3(19)
    forward = model.model.forward
    model.model.forward = lambda inputs_embeds, **more: forward(inputs_embeds=2 * inputs_embeds, **more)
    with pytest.raises(SpecError, match="scales or shifts the embeddings"):
        add_prediction(model, 1, seed=0, from_checkpoint=False)
