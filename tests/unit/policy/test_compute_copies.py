"""Copies of weights in the dtype of the computation: bits, sharing, accumulation, and restoration."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from workbench.errors import SpecError
from workbench.policy.compute_copies import compute_copies, use_module_dtypes
from workbench.policy.decoder import load_decoder
from workbench.policy.model import load_policy
from workbench.specs.precision import PRESETS


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x * self.frozen)))


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(7, 5, generator=draw).bfloat16() for _ in range(3)]


def gradients(model, inputs):
    model.zero_grad()
    for x in inputs:
        model(x).float().square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


def test_a_backward_has_the_bits_of_a_model_in_that_dtype(model):
    pure = gradients(copy.deepcopy(model).bfloat16(), batches()[:1])
    with compute_copies(model, torch.bfloat16, accumulate=False):
        mixed = model(batches()[0])
        assert mixed.dtype == torch.bfloat16
        mixed.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        if name != "frozen":
            assert parameter.grad.dtype == torch.float32
            assert torch.equal(parameter.grad, pure[name].float()), name
    assert model.frozen.grad is None


@pytest.mark.parametrize("accumulate", [False, True])
def test_several_backwards_are_added_in_one_dtype_or_the_other(model, accumulate):
    single = [gradients(copy.deepcopy(model).bfloat16(), [x]) for x in batches()]
    expected = {name: torch.zeros_like(g if accumulate else g.float()) for name, g in single[0].items()}
    for one in single:
        expected = {name: total + one[name].to(total.dtype) for name, total in expected.items()}
    with compute_copies(model, torch.bfloat16, accumulate=accumulate):
        for x in batches():
            model(x).float().square().sum().backward()
    for name, total in expected.items():
        assert torch.equal(dict(model.named_parameters())[name].grad, total.float()), name
    in_float32 = sum(one["first.bias"].float() for one in single)
    assert torch.equal(expected["first.bias"].float(), in_float32) == (not accumulate), "the two dtypes round apart"


def test_parameters_return_in_their_order_even_after_an_error(model):
    before, seen = dict(model.named_parameters()), []

    def stopped():
        with compute_copies(model, torch.bfloat16, accumulate=True):
            seen.append(model.first.weight)
            assert model.second.weight is seen[0], "shared weights share a copy"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stopped()
    assert seen[0].dtype == torch.bfloat16
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())


def test_a_policy_computes_with_copies_only_where_it_is_asked_to():
    policy = load_policy("tiny-qwen3", precision="bf16_mixed")
    tokens = torch.arange(6)
    with pytest.raises(SpecError, match=r"outside of Policy\.in_compute_dtype"):
        policy.hidden_states(tokens, tokens, None)
    assert next(policy.model.parameters()).dtype == torch.float32


# ---- kinds of modules ----------------------------------------------------------------------------------------------


def test_norms_compute_in_a_dtype_of_their_own():
    """By hand: input and weight rounded, the norm of float32 numbers, its result rounded."""
    model = load_decoder("tiny-qwen3")
    use_module_dtypes(model, {"router": None, "norms": torch.bfloat16})
    norm, hidden = model.model.norm, torch.randn(3, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.no_grad():
        norm.weight.add_(0.001)
    rounded, weight = hidden.detach().bfloat16(), norm.weight.detach().bfloat16()
    scale = (rounded.float().square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    expected = weight * (rounded.float() * scale).bfloat16()
    output = norm(hidden)
    assert output.dtype == torch.float32
    assert torch.equal(output, expected.float())
    output.sum().backward()
    assert (hidden.grad.dtype, norm.weight.grad.dtype) == (torch.float32, torch.float32)
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in load_decoder("tiny-qwen3").named_parameters()
    ]


def test_a_router_computes_in_a_dtype_of_its_own():
    model = load_decoder("tiny-qwen3-moe").bfloat16()
    block = model.model.layers[0].mlp
    hidden = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = block.gate(hidden)
    use_module_dtypes(model, {"router": torch.float32, "norms": None})
    logits, weights, experts = block.gate(hidden)
    assert {logits.dtype, weights.dtype} == {torch.bfloat16}
    wide = torch.softmax(hidden[0].float() @ block.gate.weight.float().T, -1).topk(weights.shape[-1])
    assert torch.equal(experts, wide.indices)
    assert not torch.equal(logits, before[0]) or not torch.equal(weights, before[1])
    assert block(hidden).dtype == torch.bfloat16


def test_kinds_that_a_model_does_not_have_are_refused():
    with pytest.raises(SpecError, match="no router in a qwen3 model"):
        load_policy("tiny-qwen3", precision=replace(PRESETS["bf16_mixed"], router="float32"))
