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


def test_given_routes_have_their_own_number_of_experts():
    first = torch.zeros(4, 2, 2, dtype=torch.int64)
    first[..., 1] = 1
    for name in ("chosen -1", "chosen +1"):
        assert torch.equal(logits(name, first), logits("own", first))


def test_gates_of_a_router_in_bfloat16_are_computed_in_float32():
    model = install_router(load_decoder("tiny-qwen3-moe"), "bfloat16")
    router = vars(model)["routers_of_record"][0]
    hidden = torch.randn(5, router.weight.shape[1], generator=torch.Generator().manual_seed(0))
    gates_tk = router(hidden)[1]
    logits_tE = torch.nn.functional.linear(hidden.bfloat16(), router.weight.bfloat16()).float()
    top_tk = logits_tE.softmax(-1).topk(router.top_k).values
    assert torch.equal(gates_tk, top_tk / top_tk.sum(-1, keepdim=True))


def test_given_routes_are_taken():
    first = torch.zeros(4, 2, 2, dtype=torch.int64)
    first[..., 1] = 1
    assert (logits("own", first) - logits("own", first.flip(-1) + 2)).abs().max() > 1e-3


def test_routes_of_another_model_are_refused():
    with pytest.raises(SpecError, match="3 experts of a token"):
        logits("own", torch.zeros(4, 2, 3, dtype=torch.int64))
