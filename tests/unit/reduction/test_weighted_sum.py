import torch

from workbench.losses import Term
from workbench.reduction.weighted_sum import reduce_terms, weighted_sum


def test_values_under_the_mask_reach_neither_sum_nor_gradient():
    values = torch.tensor([1.0, torch.nan, torch.inf, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    part = weighted_sum(values, torch.full((4,), 0.5), mask)
    part.value.backward()
    assert part.value.item() == 2.0
    assert values.grad.tolist() == [0.5, 0.0, 0.0, 0.5]
    assert part.partial_over == {"dp_cp"}


def test_total_is_the_sum_of_terms_with_their_coefficients():
    terms = {"policy": Term(torch.tensor([1.0, 2.0])), "kl": Term(torch.tensor([10.0, 10.0]), 0.1)}
    parts = reduce_terms(terms, torch.tensor([0.5, 0.5]), torch.tensor([True, True]))
    assert {name: part.value.item() for name, part in parts.items()} == {"policy": 1.5, "kl": 1.0, "total": 2.5}


def test_nothing_trained_gives_zero_loss_and_zero_gradient():
    values = torch.tensor([5.0, -1.0], requires_grad=True)
    part = weighted_sum(values, torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    part.value.backward()
    assert part.value.item() == 0.0
    assert values.grad.tolist() == [0.0, 0.0]
