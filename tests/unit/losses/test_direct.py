"""Policy gradients that cut no token off, against the oracle and by hand."""

import math

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed, random_weights, weighted_total
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from workbench.losses import LossInputs
from workbench.losses.direct import cispo, importance_sampling, on_policy, reinforce

CASES = [
    ("importance_sampling", {}),
    ("importance_sampling", {"anchor": "sampler"}),
    ("reinforce", {}),
    ("gpg", {}),
    ("on_policy", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28, "bounds": "relative"}),
    ("cispo", {"clip_low": None, "clip_high": 4.0, "bounds": "relative", "anchor": "sampler"}),
    ("cispo", {"clip_low": None, "clip_high": 1.3, "bounds": "absolute"}),
    ("cispo", {"clip_low": 0.9, "clip_high": 4.0, "bounds": "relative", "log_clamp": 0.3}),
    ("cispo", {"clip_low": 0.8, "clip_high": 1.3, "bounds": "absolute"}),
    ("cispo", {"clip_low": None, "clip_high": 1.1, "bounds": "absolute", "level": "document"}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28, "bounds": "relative", "level": "segment"}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_is_the_oracle(kind, parameters, seed):
    term, _ = assert_is_the_oracle(kind, parameters, nasty_documents(seed), seed=seed)
    assert term.clipped_T is None


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
def test_gradient_is_the_slope_of_the_oracle(kind, parameters):
    assert_finite_differences(kind, parameters, seed=5)


def test_on_policy_has_the_gradient_of_reinforce_and_the_value_of_a_ratio_of_1():
    documents = nasty_documents(1)
    gradients = []
    for surrogate in (on_policy, reinforce):
        policy_T, inputs = packed(documents)
        term = surrogate(inputs)
        weighted_total(term, inputs, random_weights(documents, 1)).backward()
        gradients.append(policy_T.grad)
        if surrogate is on_policy:
            counts_T = inputs.loss_mask_T
            assert torch.equal(term.values_T[counts_T], -inputs.advantages_T[counts_T])
    assert torch.equal(*gradients)


def test_cispo_keeps_a_gradient_where_ppo_has_none_and_says_which_weights_it_truncated():
    policy_T = torch.tensor([0.0, math.log(3.0), math.log(0.1)], dtype=torch.float64, requires_grad=True)
    zero_T = torch.zeros_like(policy_T, requires_grad=False)
    term = cispo(
        LossInputs(policy_T, zero_T, torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)), clip_low=0.2, clip_high=0.28
    )
    term.values_T.sum().backward()
    assert policy_T.grad.tolist() == pytest.approx([-1.0, -1.28, 0.8], abs=1e-15)
    assert term.extras["ratio_truncated"].tolist() == [False, True, True]


@pytest.mark.parametrize("surrogate", [importance_sampling, cispo])
def test_a_zero_advantage_survives_a_ratio_that_overflows(surrogate):
    policy_T = torch.zeros(1, requires_grad=True)
    term = surrogate(LossInputs(policy_T, torch.full((1,), -200.0), torch.zeros(1)))
    term.values_T.sum().backward()
    assert (term.values_T.item(), policy_T.grad.item()) == (0.0, 0.0)
