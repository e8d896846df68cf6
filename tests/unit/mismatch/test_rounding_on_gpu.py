"""Random rounding of a GPU's operations: its kernels of attention have other arguments than the CPU's."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.mismatch.rounding import NEAREST, RandomRounding

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_attention_is_torchs_up_to_rounding(kernel):
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(2, 4, 64, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad(), sdpa_kernel(getattr(SDPBackend, kernel)):
        plain = attend(query, key, value, is_causal=True)
        with RandomRounding(generator):
            drawn = attend(query, key, value, is_causal=True)
    assert 0 < (plain.float() - drawn.float()).abs().max() < 0.05


@pytest.mark.parametrize("inner", [128, 1024, 3072])
@pytest.mark.parametrize(("rows", "columns"), [(2048, 1024), (2048, 8192), (512, 1024), (96, 3072)])
def test_a_sum_in_float32_has_the_error_of_the_librarys(inner, rows, columns):
    generator = torch.Generator("cuda").manual_seed(1)
    left, right = (torch.randn(size, inner, generator=generator, device="cuda") for size in (rows, columns))
    exact = left.double() @ right.double().T
    with torch.no_grad(), RandomRounding(generator):
        drawn = left @ right.T
    real, noise = ((one.double() - exact).square().mean().sqrt() for one in (left @ right.T, drawn))
    assert 0.8 < float(noise / NEAREST / real) < 1.25
