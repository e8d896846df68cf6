"""Copies of weights in the dtype of the computation: bits, sharing, accumulation, and restoration."""

import copy

import pytest
import torch
from torch import nn

from workbench.errors import SpecError
from workbench.policy.compute_copies import compute_copies
from workbench.policy.model import load_policy


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
