"""A gradient times a number of the device: rounded once, and left alone where the number is 1."""

from __future__ import annotations

import pytest
import torch

from workbench.policy.logprobs.coefficients import ROUNDING, add_scaled_, scale_, slack

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def values(dtype, seed=0, size=5001):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
def test_scaled_in_place_with_a_factor_that_is_not_rounded_first(dtype):
    gradient, factor = values(dtype), torch.tensor(1 / 3)
    expected = (gradient.double() * factor.double()).to(dtype)
    out = scale_(gradient, factor)
    assert out is gradient
    torch.testing.assert_close(gradient, expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_a_factor_of_one_touches_nothing():
    gradient = values(torch.float32)
    version = gradient._version
    scale_(gradient, torch.tensor([1.0]))
    assert gradient._version == version


@DTYPES
def test_added_in_place(dtype):
    into, gradient, factor = values(dtype), values(dtype, 1), torch.tensor([-0.7])
    expected = (into.double() + gradient.double() * factor.double()).to(dtype)
    assert add_scaled_(into, gradient, factor) is into
    torch.testing.assert_close(into, expected, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


def test_the_tolerance_of_coefficients_is_that_of_typical_ones():
    """One that is huge widens that of the others a little; zeros narrow it as they narrow the mean."""
    unit = ROUNDING * torch.finfo(torch.float64).eps
    ones, zeros = torch.ones(1, 40, dtype=torch.float64), torch.zeros(1, 40, dtype=torch.float64)
    torch.testing.assert_close(slack(ones) / unit, 2 * ones, rtol=1e-12, atol=0)
    huge = ones.index_fill(1, torch.tensor([7]), 1e16)
    allowed = slack(huge)[0] / unit
    assert 1 < allowed[0] < 4
    assert 1e16 < allowed[7] < 1.1e16
    torch.testing.assert_close(slack(torch.cat([ones, zeros], 1))[0, 40:] / unit, ones[0] / 2, rtol=1e-12, atol=0)
    assert slack(zeros).eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_match_torch(dtype):
    into, gradient = (values(dtype, seed, 10_000_019).cuda() for seed in (0, 1))
    factor = torch.tensor([1 / 3], device="cuda")
    expected = (into.double() + gradient.double() * factor.double()).to(dtype)
    torch.testing.assert_close(add_scaled_(into.clone(), gradient, factor), expected, rtol=1e-2, atol=1e-6)
    expected = (into.double() * factor.double()).to(dtype)
    torch.testing.assert_close(scale_(into.clone(), factor), expected, rtol=torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(scale_(into.clone(), torch.ones(1, device="cuda")), into, rtol=0, atol=0)
