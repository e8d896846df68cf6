"""An encoder sharded over tp and cp matches the unsharded one, or raises an error."""

import pytest
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

from tests.helpers.bars import assert_float64_parity
from workbench.errors import ShardingError, SpecError
from workbench.policy import encoder, tensor_plan
from workbench.policy.decoder import TINY_VISION, VISION_SIZES
from workbench.policy.encoder import make_encoder
from workbench.sharding.gradients import full_gradients, sum_gradients
from workbench.sharding.simulated import simulate
from workbench.sharding.tensor_parallel import apply_tensor_parallel

PIXELS = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WEIGHTS = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def found(mesh, name, order="contiguous"):
    """Features of three images, those of this rank, and full gradients of a weighted sum of all."""
    made = make_encoder(TINY_VISION[name](seed=4), 16, mesh=mesh, precision="float64", seed=5, order=order)
    features = made.features(PIXELS)
    places_s = made.places_Rs[mesh["cp"].rank]
    (features * WEIGHTS[:, places_s]).sum().backward()
    sum_gradients(made.model, made.shards, mesh)
    return features.detach(), places_s, full_gradients(made.model, made.shards, mesh)


@pytest.mark.parametrize(
    ("name", "cp", "tp", "order"),
    [
        ("tiny-siglip", 1, 2, "contiguous"),
        ("tiny-siglip", 2, 1, "zigzag"),
        ("tiny-siglip", 4, 1, "contiguous"),
        ("tiny-siglip", 2, 2, "contiguous"),
        ("tiny-clip", 1, 4, "contiguous"),
        ("tiny-clip", 5, 1, "contiguous"),
    ],
)
def test_a_cut_encoder_is_the_whole_one(name, cp, tp, order):
    [(whole, _, expected)] = simulate(lambda mesh: found(mesh, name))
    for features, places_s, gradients in simulate(lambda mesh: found(mesh, name, order), cp=cp, tp=tp):
        torch.testing.assert_close(features, whole[:, places_s], rtol=0, atol=1e-13)
        assert_float64_parity(gradients, expected, context=f"{name}, cp {cp}, tp {tp}")


def test_whole_features_are_those_of_the_stock_model():
    vision = TINY_VISION["tiny-siglip"](seed=4).double()
    with torch.no_grad():
        hidden = vision(pixel_values=PIXELS).last_hidden_state
    made = make_encoder(TINY_VISION["tiny-siglip"](seed=4), 16, precision="float64", seed=5)
    expected = made.model.projector(hidden)
    torch.testing.assert_close(made.features(PIXELS), expected, rtol=0, atol=1e-5)  # its softmax is of float32


def test_invalid_settings_are_refused():
    with pytest.raises(SpecError, match="pooling head"):
        make_encoder(SiglipVisionModel(SiglipVisionConfig(**VISION_SIZES)), 16)
    with pytest.raises(ShardingError, match="4 encoder heads"):
        simulate(lambda mesh: found(mesh, "tiny-siglip"), tp=3)
    with pytest.raises(ShardingError, match="5 tokens"):
        simulate(lambda mesh: found(mesh, "tiny-clip"), cp=2)


def test_a_wrong_plan_is_detected_by_measurement(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(tensor_plan.NAMES, "out_proj", "rowwise_split_input")
        with pytest.raises(
            SpecError,
            match=r"model type 'siglip_vision_model' over tp=2, cp=1\n"
            "  found: RuntimeError",
        ):
            simulate(lambda mesh: found(mesh, "tiny-siglip"), tp=2)

    def unevenly(model, plan, axis):
        shards = apply_tensor_parallel(model, plan, axis)
        model.projector.fc2.weight.data *= 1 + axis.rank / 100
        return shards

    monkeypatch.setattr(encoder, "apply_tensor_parallel", unevenly)
    with pytest.raises(SpecError, match="features off by"):
        simulate(lambda mesh: found(mesh, "tiny-siglip"), tp=2)


def test_attention_that_does_not_gather_is_detected_by_measurement(monkeypatch):
    monkeypatch.setattr(encoder, "gather_scatter", lambda local, axis, *, dim: local)
    with pytest.raises(SpecError, match=r"over tp=1, cp=2\n  found: features off by"):
        simulate(lambda mesh: found(mesh, "tiny-siglip"), cp=2)


def test_the_projector_is_drawn_from_its_seed_and_leaves_the_global_state():
    torch.manual_seed(9)
    drawn = [
        make_encoder(TINY_VISION["tiny-siglip"](seed=4), 16, seed=seed).model.projector.fc1.weight for seed in (5, 5, 6)
    ]
    after = torch.rand(1)
    torch.manual_seed(9)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
