import pytest
import torch

from workbench.errors import SpecError
from workbench.losses.terms import Term
from workbench.reduction.weighted_sum import reduce_terms, weighted_sum
from workbench.reduction.weights import TokenWeights


def same(weights_T):
    return TokenWeights(weights_T, weights_T)


def test_values_under_the_mask_reach_neither_sum_nor_gradient():
    values = torch.tensor([1.0, torch.nan, torch.inf, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    part = weighted_sum(values, same(torch.full((4,), 0.5)), mask)
    part.value.backward()
    assert part.value.item() == 2.0
    assert values.grad.tolist() == [0.5, 0.0, 0.0, 0.5]
    assert part.partial_over == {"dp_cp"}


def test_the_gradient_has_a_weight_of_its_own():
    values = torch.tensor([1.0, torch.nan, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    weights = TokenWeights(torch.tensor([0.5, 0.0, 0.25]), torch.tensor([0.125, 7.0, 2.0]))
    part = weighted_sum(2 * values, weights, mask)
    (3 * part.value).backward()
    assert part.value.item() == 0.5 * 2 + 0.25 * 6
    assert values.grad.tolist() == [3 * 2 * 0.125, 0.0, 3 * 2 * 2.0]


def test_total_is_the_sum_of_terms_with_their_coefficients():
    terms = {"policy": Term(torch.tensor([1.0, 2.0])), "kl": Term(torch.tensor([10.0, 10.0]), 0.1)}
    parts = reduce_terms(terms, {"policy": same(torch.tensor([0.5, 0.5]))}, torch.tensor([True, True]))
    assert {name: part.value.item() for name, part in parts.items()} == {"policy": 1.5, "kl": 1.0, "total": 2.5}


def test_each_term_is_summed_with_the_weights_that_it_names():
    terms = {"policy": Term(torch.tensor([1.0, 2.0])), "nll": Term(torch.tensor([4.0, 8.0]), weight="token")}
    weights = {"policy": same(torch.tensor([1.0, 0.0])), "token": same(torch.tensor([0.25, 0.25]))}
    parts = reduce_terms(terms, weights, torch.tensor([True, True]))
    assert {name: part.value.item() for name, part in parts.items()} == {"policy": 1.0, "nll": 3.0, "total": 4.0}


def test_weights_that_the_step_does_not_have_are_refused():
    with pytest.raises(SpecError, match="term 'kl' with weights 'rows'\n  found: weights policy"):
        reduce_terms({"kl": Term(torch.ones(1), weight="rows")}, {"policy": same(torch.ones(1))}, torch.tensor([True]))


@pytest.mark.parametrize("two", [False, True])
def test_nothing_trained_gives_zero_loss_and_zero_gradient(two):
    values = torch.tensor([5.0, -1.0], requires_grad=True)
    weights = TokenWeights(torch.zeros(2), torch.zeros(2)) if two else same(torch.zeros(2))
    part = weighted_sum(values, weights, torch.zeros(2, dtype=torch.bool))
    part.value.backward()
    assert part.value.item() == 0.0
    assert values.grad.tolist() == [0.0, 0.0]
