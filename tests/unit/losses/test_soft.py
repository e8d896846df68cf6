"""SAPO and DRO against the oracle and at their limits."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents
from tests.helpers.surrogate_checks import assert_finite_differences, assert_is_the_oracle
from workbench.losses import LossInputs
from workbench.losses.soft import dro, sapo

CASES = [
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05}),
    ("sapo", {"tau_positive": 3.0, "tau_negative": 0.7}),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.05, "log_clamp": 0.5}),
    ("dro", {"beta": 0.3}),
    ("dro", {"beta": 0.0, "anchor": "sampler"}),
]


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_is_the_oracle(kind, parameters, seed):
    # 1 - sigmoid cancels where the sigmoid is almost 1: its derivative keeps absolute, not relative digits.
    assert_is_the_oracle(kind, parameters, nasty_documents(seed), seed=seed, absolute=1e-13)


@pytest.mark.parametrize(("kind", "parameters"), CASES, ids=str)
def test_gradient_is_the_slope_of_the_oracle(kind, parameters):
    assert_finite_differences(kind, parameters, seed=2)


def test_sapo_takes_the_steepness_of_its_sign_in_full_precision():
    zero_T = torch.zeros(2, dtype=torch.float64)
    policy_T = torch.full((2,), 0.5, dtype=torch.float64)
    values_T = sapo(
        LossInputs(policy_T, zero_T, torch.tensor([1.0, -1.0], dtype=torch.float64)), tau_positive=1.1, tau_negative=1.7
    ).values_T
    expected = [
        -sign * 4 / tau / (1 + torch.exp(-tau * (policy_T[0].exp() - 1))).item() for sign, tau in ((1, 1.1), (-1, 1.7))
    ]
    assert values_T.tolist() == pytest.approx(expected, rel=1e-15)  # 1.1 in float32 is off by 2e-8


def test_sapo_is_flat_and_finite_where_the_ratio_overflows():
    policy_T = torch.zeros(1, requires_grad=True)
    term = sapo(LossInputs(policy_T, torch.full((1,), -200.0), torch.ones(1)))
    term.values_T.sum().backward()
    assert (term.values_T.item(), policy_T.grad.item()) == (-4.0, 0.0)


def test_dro_pulls_back_to_the_anchor_without_an_advantage():
    policy_T = torch.tensor([-1.0, -3.0], requires_grad=True)
    dro(LossInputs(policy_T, torch.tensor([-2.0, -2.0]), torch.zeros(2)), beta=0.5).values_T.sum().backward()
    assert policy_T.grad.tolist() == [0.5, -0.5]


def test_sapo_of_documents_may_average_their_advantages():
    policy_T = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    inputs = LossInputs(
        policy_T,
        policy_T - 0.3,
        torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64),
        document_ids_T=torch.tensor([0, 0, 1]),
    )
    mean = replace(inputs, advantages_T=torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64))
    found = sapo(inputs, level="document", advantage_level="document")
    assert torch.equal(found.values_T, sapo(mean, level="document").values_T)
    assert not torch.equal(found.values_T, sapo(inputs, level="document").values_T)
