"""Values and gradients by hand, at every corner of the clip; the whole step is held to the oracle in tests/parity."""

import math

import pytest
import torch

from workbench.errors import SpecError
from workbench.losses import LossInputs, clipped_surrogate, grpo, kl_k3


def inputs(ratio, advantage, **more):
    policy = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    return policy, LossInputs(policy, zero, torch.tensor([advantage], dtype=torch.float64), **more)


@pytest.mark.parametrize(("ratio", "advantage", "value", "gradient"), [
    (1.0, 2.0, -2.0, -2.0),
    (1.25, 2.0, -2.5, -2.5),      # inside the upper bound of 1.28
    (1.5, 2.0, -2.56, 0.0),       # above it, pushed further up: clipped
    (1.5, -2.0, 3.0, 3.0),        # above it, pushed back down: never clipped
    (0.5, 2.0, -1.0, -1.0),       # below, pushed back up
    (0.5, -2.0, 1.6, 0.0),        # below 0.8, pushed further down: clipped
    (1.5, 0.0, 0.0, 0.0),
])
def test_surrogate_at_every_corner(ratio, advantage, value, gradient):
    policy, given = inputs(ratio, advantage)
    term = clipped_surrogate(given, clip_low=0.2, clip_high=0.28)
    term.values_T.sum().backward()
    assert term.values_T.item() == pytest.approx(value, abs=1e-15)
    assert policy.grad.item() == pytest.approx(gradient, abs=1e-15)
    assert bool(term.clipped_T) == (gradient == 0.0 and advantage != 0)


def test_frozen_decisions_win():
    policy, given = inputs(1.0, 2.0, frozen_clip_T=torch.tensor([True]))
    term = clipped_surrogate(given, clip_low=0.2, clip_high=0.28)
    term.values_T.sum().backward()
    assert term.values_T.item() == pytest.approx(-2.56, abs=1e-15)
    assert policy.grad.item() == 0.0


@pytest.mark.parametrize("gap", [-2.0, -1e-9, 0.0, 1e-9, 0.5])
def test_k3_is_exp_minus_one_minus_d(gap):
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    value = kl_k3(policy, policy.detach() + gap)
    value.sum().backward()
    assert value.item() == pytest.approx(math.expm1(gap) - gap, abs=1e-16)
    assert value.item() >= 0
    assert policy.grad.item() == pytest.approx(-math.expm1(gap), abs=1e-15)


def test_kl_term_carries_its_coefficient():
    _, given = inputs(1.0, 2.0, ref_logprobs_T=torch.tensor([0.3], dtype=torch.float64))
    terms = grpo(given, kl_coefficient=0.05)
    assert (list(terms), terms["kl"].coefficient) == (["policy", "kl"], 0.05)
    assert list(grpo(given)) == ["policy"]


def test_kl_without_a_reference_is_refused():
    _, given = inputs(1.0, 2.0)
    with pytest.raises(SpecError, match="no ref_logprobs"):
        grpo(given, kl_coefficient=0.1)


@pytest.mark.parametrize(("policy", "old", "advantage"), [(0.0, -200.0, 2.0), (0.0, -200.0, 0.0)])
def test_a_token_without_gradient_has_none_even_where_exp_overflows(policy, old, advantage):
    leaf = torch.tensor([policy], requires_grad=True)  # float32: exp(200) is infinite
    term = clipped_surrogate(LossInputs(leaf, torch.tensor([old]), torch.tensor([advantage])), clip_low=0.2,
                             clip_high=0.28)
    term.values_T.sum().backward()
    assert leaf.grad.item() == 0.0
    assert term.values_T.item() == pytest.approx(-1.28 * advantage)
    assert bool(term.clipped_T) == (advantage > 0)
