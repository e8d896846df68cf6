"""Gradients of means over no token, against autograd on plain formulas whose mask is 0 everywhere."""

import math

import pytest
import torch

from workbench.systems.empty_batch import (
    clipped_mean_gradient,
    sequence_mean_gradient,
    undefined,
    value_mean_gradient,
)

G = torch.Generator().manual_seed(5)
POLICY = -3 * torch.rand(40, generator=G, dtype=torch.float64)
OLD = POLICY.clone() + torch.randn(40, generator=G, dtype=torch.float64)
OLD[:2] = POLICY[:2] - torch.tensor([25.0, -25.0], dtype=torch.float64)
ADVANTAGES = torch.randn(40, generator=G, dtype=torch.float64)
ADVANTAGES[5] = 0


def mean_of_nothing(values):
    nothing = torch.zeros_like(values)
    return (values * nothing).sum() / nothing.sum()


def same_nan(found, expected):
    assert torch.equal(found.isnan(), expected.isnan())
    assert not found.nan_to_num().any()
    assert not expected.nan_to_num().any()


def test_the_loss_is_no_number():
    assert math.isnan(undefined())
    assert undefined().dtype == torch.float64


@pytest.mark.parametrize("dual_clip", [None, 1.2])
def test_a_token_that_is_cut_off_has_no_gradient_and_every_other_one_no_number(dual_clip):
    x = POLICY.clone().requires_grad_()
    ratio = (x - OLD).clamp(-20, 20).exp()
    value = torch.min(ratio * ADVANTAGES, ratio.clamp(0.8, 1.28) * ADVANTAGES)
    if dual_clip is not None:
        value = torch.where(ADVANTAGES < 0, torch.max(value, dual_clip * ADVANTAGES), value)
    mean_of_nothing(-value).backward()
    result = clipped_mean_gradient(
        POLICY, OLD, ADVANTAGES, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip, log_clamp=20.0
    )
    same_nan(result, x.grad)
    assert set(result.isnan().tolist()) == {True, False}


@pytest.mark.parametrize("low", [0.2, 1.5])
def test_a_row_with_an_empty_ratio(low):
    rows, x = torch.arange(40) // 4, POLICY.clone().requires_grad_()
    advantages = ADVANTAGES.clone()
    advantages[:8] = -1.0
    nothing = torch.zeros(10, 4, dtype=torch.float64)
    ratio = (((x - OLD).reshape(10, 4) * nothing).sum(-1) / nothing.sum(-1).clamp(min=1)).exp()[:, None] * nothing
    rectangle = advantages.reshape(10, 4)
    loss = -torch.min(ratio * rectangle, ratio.clamp(1 - low, 1.28) * rectangle)
    mean_of_nothing((loss * nothing).sum(-1)).backward()
    same_nan(sequence_mean_gradient(advantages, rows, low), x.grad)
    assert x.grad[:8].isnan().any() == (low > 1)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_critics_error(clip):
    x, returns = POLICY.clone().requires_grad_(), ADVANTAGES
    errors = (x - returns) ** 2
    if clip is not None:
        errors = torch.max((OLD + (x - OLD).clamp(-clip, clip) - returns) ** 2, errors)
    mean_of_nothing(errors).backward()
    same_nan(value_mean_gradient(POLICY, returns, OLD, clip), x.grad)
