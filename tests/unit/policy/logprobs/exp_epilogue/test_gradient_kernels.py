"""The kernels, interpreted where no GPU is."""

from __future__ import annotations

import pytest
import torch

from tests.unit.policy.logprobs.exp_epilogue.test_kernels import DEVICE, T, V
from workbench.policy.logprobs.exp_epilogue import gradient_kernels
from workbench.policy.logprobs.exp_epilogue.gradient_kernels import add_in_place, scale_in_place


@pytest.mark.parametrize("factor", [1.0, -0.25])
def test_every_element_is_scaled_once(factor):
    old = torch.arange(9000.0, device=DEVICE)
    values, by = old.clone(), torch.tensor([factor], device=DEVICE)
    scale_in_place(values, by)
    assert values.tolist() == (old * factor).tolist()
    add_in_place(values, old, by)
    assert values.tolist() == (old * factor + old * factor).tolist()


def test_a_bias_gets_the_sum_over_rows_of_scaled_gradients():
    g = torch.Generator().manual_seed(5)
    gradient, scales = torch.randn(T, 200, generator=g).to(DEVICE)[:, :V], torch.randn(T, generator=g).to(DEVICE)
    result = torch.full((V,), torch.nan, device=DEVICE)
    for first in (True, False):
        gradient_kernels.add_columns[(1,)](
            gradient, scales, result, T, V, gradient.stride(0), FIRST=first, ROWS=32, BLOCK=128
        )
    torch.testing.assert_close(result.double(), 2 * scales.double() @ gradient.double(), rtol=1e-5, atol=1e-5)


def test_rows_are_scaled_in_place_and_nothing_else():
    g = torch.Generator().manual_seed(6)
    wide, scales = torch.randn(5, 90, generator=g).to(DEVICE), torch.randn(5, generator=g).to(DEVICE)
    expected = wide.clone()
    expected[:, :70] *= scales[:, None]
    gradient_kernels.scale_rows[(5,)](wide, scales, 70, *wide.stride(), BLOCK=32)
    torch.testing.assert_close(wide, expected, rtol=1e-6, atol=0)
