import pytest
import torch

from workbench.errors import SpecError
from workbench.mismatch.routing import install_router, replay
from workbench.policy.decoder import load_decoder

TOKENS = torch.tensor([[1, 5, 2, 8]])


def logits(name, given=None):
    model = install_router(load_decoder("tiny-qwen3-moe"), name)
    with torch.no_grad(), replay(model, given):
        return model(TOKENS).logits


def test_own_routes_change_nothing_and_replayed_own_ones_neither():
    with torch.no_grad():
        plain = load_decoder("tiny-qwen3-moe")(TOKENS).logits
    assert torch.equal(logits("own"), plain)
    assert torch.allclose(logits("own", torch.full((4, 2, 2), -1)), plain, atol=1e-6)


@pytest.mark.parametrize("name", ["bfloat16", "chosen -1", "chosen +1", "renormalized"])
def test_another_router_changes_the_logits(name):
    assert (logits(name) - logits("own")).abs().max() > 1e-5


def test_given_routes_are_taken():
    first = torch.zeros(4, 2, 2, dtype=torch.int64)
    first[..., 1] = 1
    assert (logits("own", first) - logits("own", first.flip(-1) + 2)).abs().max() > 1e-3


def test_routes_of_another_model_are_refused():
    with pytest.raises(SpecError, match="3 experts of a token"):
        logits("own", torch.zeros(4, 2, 3, dtype=torch.int64))
