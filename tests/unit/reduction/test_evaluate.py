"""The evaluator: inputs are harmless where nothing counts, and terms are summed with the weights of the step."""

import dataclasses

import pytest
import torch

from tests.helpers.rectangles import rectangle
from workbench.errors import SpecError
from workbench.losses.build import build_loss
from workbench.losses.terms import LossInputs, Term
from workbench.reduction.evaluate import (
    CORRECTION_WEIGHTS,
    evaluate_loss,
    loss_inputs,
    reduce_terms,
    token_values,
    weighted_sum,
)
from workbench.reduction.weights import StepTotals, TokenWeights, step_weights
from workbench.specs.losses import LossSpec

TOTALS = StepTotals(1, 1, {"a number of the step": 2.0})


def test_inputs_are_the_rows_and_the_policy_is_the_old_one_where_nothing_counts():
    row, text = rectangle(0)
    broken = text._replace(logprobs_T=torch.where(row.loss_mask_T, text.logprobs_T, torch.nan))
    frozen_T = torch.zeros_like(row.loss_mask_T)
    inputs = loss_inputs(row, broken, TOTALS, frozen_clip_T=frozen_T)
    assert torch.equal(inputs.policy_logprobs_T[row.loss_mask_T], text.logprobs_T[row.loss_mask_T])
    assert torch.equal(inputs.policy_logprobs_T[~row.loss_mask_T], row.old_logprobs_T[~row.loss_mask_T])
    for name in (
        "old_logprobs_T",
        "advantages_T",
        "sampler_logprobs_T",
        "ref_logprobs_T",
        "loss_mask_T",
        "document_ids_T",
        "lengths_T",
        "rewards_T",
        "group_ids_T",
        "source_T",
    ):
        assert getattr(inputs, name) is getattr(row, name), name
    assert inputs.correction_weights_T is row.extensions[CORRECTION_WEIGHTS]
    assert inputs.entropy_T is text.entropy_T
    assert inputs.frozen_clip_T is frozen_T
    assert inputs.statistics == TOTALS.statistics


def test_a_batch_without_ready_made_weights_has_none():
    row, text = rectangle(0)
    assert loss_inputs(dataclasses.replace(row, extensions={}), text, TOTALS).correction_weights_T is None


def test_terms_are_summed_with_the_weights_of_the_step():
    row, text = rectangle(1)
    spec = LossSpec(name="reinforce", denominator="document", kl={"coefficient": 0.5, "estimator": "k1"})
    leaf_T = text.logprobs_T.clone().requires_grad_()
    (weights,), totals = step_weights([row], spec)
    inputs = loss_inputs(row, text._replace(logprobs_T=leaf_T), totals)
    looked_at, terms, scalars = evaluate_loss(build_loss(spec), inputs, weights, row.loss_mask_T)
    assert looked_at is inputs
    assert terms.keys() == {"policy", "kl"}
    each = {"policy": -row.advantages_T * text.logprobs_T, "kl": 0.5 * (text.logprobs_T - row.ref_logprobs_T)}
    counted = [d for d in row.document_ids_T.unique().tolist() if row.loss_mask_T[row.document_ids_T == d].any()]
    for name, values_T in each.items():
        means = [float(values_T[(row.document_ids_T == d) & row.loss_mask_T].mean()) for d in counted]
        assert float(scalars[name].value.detach()) == pytest.approx(sum(means) / len(means), rel=1e-12), name
    scalars["total"].value.backward()
    lengths_T = len(counted) * row.lengths_T
    expected_T = torch.where(row.loss_mask_T, (-row.advantages_T + 0.5) / lengths_T, 0.0)
    torch.testing.assert_close(leaf_T.grad, expected_T)


def test_an_epsilon_in_means_changes_the_loss():
    inputs = LossInputs(torch.tensor([0.0, 2.0]), torch.zeros(2), torch.ones(2), length_epsilon=2.0)
    assert inputs.document_mean(inputs.policy_logprobs_T).tolist() == pytest.approx([0.5, 0.5])


def test_token_values_sum_terms_with_their_coefficients():
    terms = {"policy": Term(torch.tensor([1.0, 2.0]), 0.5), "kl": Term(torch.tensor([10.0, 0.0]), 0.1)}
    assert token_values(terms).tolist() == [1.5, 1.0]


# -- plain weighted sums -------------------------------------------------------------------------------------------


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
