"""The evaluator: inputs are harmless where nothing counts, and terms are summed with the weights of the step."""

import dataclasses

import pytest
import torch

from tests.helpers.rectangles import rectangle
from workbench.losses.build import make_loss
from workbench.losses.terms import LossInputs, Term
from workbench.reduction.evaluate import CORRECTION_WEIGHTS, evaluate_loss, loss_inputs, token_values
from workbench.reduction.weights import StepTotals, step_weights
from workbench.specs.losses import LossSpec

TOTALS = StepTotals(1, 1, {"a number of the step": 2.0})


def test_inputs_are_the_rows_and_the_policy_is_the_old_one_where_nothing_counts():
    row, said = rectangle(0)
    broken = said._replace(logprobs_T=torch.where(row.loss_mask_T, said.logprobs_T, torch.nan))
    frozen_T = torch.zeros_like(row.loss_mask_T)
    inputs = loss_inputs(row, broken, TOTALS, frozen_clip_T=frozen_T)
    assert torch.equal(inputs.policy_logprobs_T[row.loss_mask_T], said.logprobs_T[row.loss_mask_T])
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
    assert inputs.entropy_T is said.entropy_T
    assert inputs.frozen_clip_T is frozen_T
    assert inputs.statistics == TOTALS.statistics


def test_a_batch_without_ready_made_weights_has_none():
    row, said = rectangle(0)
    assert loss_inputs(dataclasses.replace(row, extensions={}), said, TOTALS).correction_weights_T is None


def test_terms_are_summed_with_the_weights_of_the_step():
    row, said = rectangle(1)
    spec = LossSpec(name="reinforce", denominator="document", kl={"coefficient": 0.5, "estimator": "k1"})
    leaf_T = said.logprobs_T.clone().requires_grad_()
    (weights,), totals = step_weights([row], spec)
    inputs = loss_inputs(row, said._replace(logprobs_T=leaf_T), totals)
    looked_at, terms, scalars = evaluate_loss(make_loss(spec), inputs, weights, row.loss_mask_T)
    assert looked_at is inputs
    assert terms.keys() == {"policy", "kl"}
    each = {"policy": -row.advantages_T * said.logprobs_T, "kl": 0.5 * (said.logprobs_T - row.ref_logprobs_T)}
    counted = [d for d in row.document_ids_T.unique().tolist() if row.loss_mask_T[row.document_ids_T == d].any()]
    for name, values_T in each.items():
        means = [float(values_T[(row.document_ids_T == d) & row.loss_mask_T].mean()) for d in counted]
        assert float(scalars[name].value.detach()) == pytest.approx(sum(means) / len(means), rel=1e-12), name
    scalars["total"].value.backward()
    lengths_T = len(counted) * row.lengths_T
    expected_T = torch.where(row.loss_mask_T, (-row.advantages_T + 0.5) / lengths_T, 0.0)
    torch.testing.assert_close(leaf_T.grad, expected_T)


def test_an_epsilon_in_means_reaches_the_loss():
    inputs = LossInputs(torch.tensor([0.0, 2.0]), torch.zeros(2), torch.ones(2), length_epsilon=2.0)
    assert inputs.document_mean(inputs.policy_logprobs_T).tolist() == pytest.approx([0.5, 0.5])


def test_what_a_token_adds_before_it_is_weighed_has_every_coefficient():
    terms = {"policy": Term(torch.tensor([1.0, 2.0]), 0.5), "kl": Term(torch.tensor([10.0, 0.0]), 0.1)}
    assert token_values(terms).tolist() == [1.5, 1.0]
