"""Inputs of a loss: shapes, lengths, and masked values that never matter."""

import math

import pytest
import torch

from workbench.errors import ShapeError, SpecError
from workbench.losses import LossInputs, Term, build_loss
from workbench.specs.losses import LossSpec

MASK = torch.tensor([True, False, True, True])


def inputs(**more):
    policy_T = torch.tensor([-1.0, math.nan, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    old_T = torch.tensor([-1.5, math.inf, -2.0, -2.5], dtype=torch.float64)
    advantages_T = torch.tensor([1.0, math.nan, 2.0, 0.0], dtype=torch.float64)
    return policy_T, LossInputs(policy_T, old_T, advantages_T, loss_mask_T=MASK, **more)


def test_inputs_of_other_lengths_are_refused():
    with pytest.raises(ShapeError, match="old_logprobs_T has T=2, but policy_logprobs_T has T=3"):
        LossInputs(torch.zeros(3), torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize(
    ("view", "values", "slope"),
    [
        (lambda i: i.log_ratio(), [0.5, 0.0, 0.0, -0.5], 1.0),
        (lambda i: i.counted_logprobs_T, [-1.0, 0.0, -2.0, -3.0], 1.0),
        (lambda i: i.counted_advantages_T, [1.0, 0.0, 2.0, 0.0], None),
    ],
)
def test_uncounted_tokens_are_0_without_gradient(view, values, slope):
    policy_T, given = inputs()
    seen_T = view(given)
    assert seen_T.tolist() == values
    if slope is not None:
        (seen_T * torch.tensor([1.0, math.nan, 1.0, 1.0])).sum().backward()  # a consumer that multiplies with NaN
        assert policy_T.grad.tolist() == [slope, 0.0, slope, slope]


def test_lengths_are_counted_or_taken_as_given_and_never_0():
    ids_T = torch.tensor([0, 0, 1, -1])
    mask_T = torch.tensor([True, True, False, False])
    zero_T = torch.zeros(4, dtype=torch.float64)
    counted = LossInputs(zero_T, zero_T, zero_T, loss_mask_T=mask_T, document_ids_T=ids_T)
    assert counted.document_lengths_T.tolist() == [2.0, 2.0, 1.0, 1.0]
    given = LossInputs(zero_T, zero_T, zero_T, loss_mask_T=mask_T, lengths_T=torch.tensor([5, 5, 0, 0]))
    assert given.document_lengths_T.tolist() == [5.0, 5.0, 1.0, 1.0]
    assert given.document_lengths_T.dtype == torch.float64


def test_without_a_mask_or_documents_everything_counts_and_is_one_document():
    given = LossInputs(torch.tensor([1.0, 3.0]), torch.zeros(2), torch.zeros(2))
    assert given.document_mean(given.policy_logprobs_T).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("policy", ["sampler", "ref"])
def test_a_policy_that_is_not_there_is_named(policy):
    _, given = inputs()
    with pytest.raises(SpecError, match=f"no {policy}_logprobs"):
        given.log_ratio(policy)


def test_a_term_uses_the_denominator_weight_by_default():
    assert (Term(torch.zeros(1)).weight, Term(torch.zeros(1)).coefficient) == ("policy", 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["grpo", "gspo", "luspo", "gmpo", "vespo"])
def test_half_precision_is_upcast_with_identical_results(name, dtype):
    g = torch.Generator().manual_seed(0)
    policy_T = -torch.rand(1000, generator=g)
    given = [(policy_T + 0.02 * torch.randn(1000, generator=g)).to(dtype), torch.ones(1000, dtype=dtype)]
    results = []
    for lift in (torch.Tensor.clone, torch.Tensor.float):
        leaf_T = lift(policy_T.to(dtype)).detach().requires_grad_()
        values_T = build_loss(LossSpec(name=name))(LossInputs(leaf_T, *map(lift, given)))["policy"].values_T
        values_T.sum().backward()
        results.append((values_T.detach(), leaf_T.grad.to(dtype)))
    for half_T, full_T in zip(*results, strict=True):
        torch.testing.assert_close(half_T, full_T, rtol=0, atol=0)


def test_a_long_document_is_counted_in_half_precision():
    logprobs_T = torch.zeros(1000, dtype=torch.bfloat16)
    assert float(LossInputs(logprobs_T, logprobs_T, logprobs_T).document_lengths_T[0]) == 1000


@pytest.mark.parametrize("name", ["loss_mask_T", "frozen_clip_T"])
def test_a_numeric_mask_is_refused(name):
    zeros_T = torch.zeros(3)
    with pytest.raises(ShapeError, match=f"{name}(.|\\n)*a mask is bool"):
        LossInputs(zeros_T, zeros_T, zeros_T, **{name: torch.ones(3)})
