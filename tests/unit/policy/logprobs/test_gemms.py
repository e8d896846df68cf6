import pytest
import torch

from workbench.policy.logprobs.gemms import add_gemm_, exact_float32


@pytest.mark.parametrize(
    ("operands", "sums"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_the_first_product_overwrites_and_the_next_is_added(operands, sums):
    gradient, hidden = torch.randn(7, 5).to(operands), torch.randn(7, 3).to(operands)
    found = torch.full((5, 3), torch.nan, dtype=sums)
    add_gemm_(found, gradient, hidden, first=True)
    add_gemm_(found, gradient, hidden, first=False)
    expected = 2 * gradient.double().T @ hidden.double()
    torch.testing.assert_close(
        found.double(), expected, rtol=0, atol={torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 0.1}[sums]
    )


def test_half_precision_is_summed_in_float32():
    ones = torch.ones(300, 1, dtype=torch.bfloat16)  # 256 + 1 is 256 in bfloat16
    found = torch.zeros(1, 1)
    for row in ones.split(1):
        add_gemm_(found, row, row, first=False)
    assert found.item() == 300


@pytest.mark.parametrize("before", ["tf32", "ieee", "none"])
def test_float32_is_exact_inside_and_as_it_was_outside(before):
    setting = torch.backends.cuda.matmul
    outside, setting.fp32_precision = setting.fp32_precision, before
    try:
        with exact_float32(torch.float32):
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == before
        with exact_float32(torch.bfloat16):
            assert setting.fp32_precision == before
        with pytest.raises(ZeroDivisionError), exact_float32(torch.float32):
            raise ZeroDivisionError
        assert setting.fp32_precision == before
    finally:
        setting.fp32_precision = outside
