"""An element of a GEMM depends only on its row and column; weight gradients are exact sums of blocks."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kernel_numbers import DEVICE, draw, far, zeros
from workbench.reproducible.kernels import plain, triton_16bit

BLOCK = 16


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(48, 40, 24), (32, 19, 72)])
def test_products(rows, columns, depth, dtype):
    x, weight, dy = draw(rows, depth), draw(columns, depth, seed=1), draw(rows, columns, seed=2)
    bar = 1e-6 if dtype else 4e-3
    y, dx = (
        triton_16bit.matmul(x, weight, BLOCK, columns, dtype),
        triton_16bit.matmul_backward(dy, weight, BLOCK, depth, dtype),
    )
    assert far(y, x.double() @ weight.double().T) < bar
    assert far(dx, dy.double() @ weight.double()) < bar
    assert y.dtype == (dtype or torch.bfloat16)


def test_an_element_of_a_gemm_depends_only_on_its_row_and_column():
    x, weight = draw(64, 40), draw(48, 40, seed=1)
    whole = triton_16bit.matmul(x, weight, BLOCK, 48, torch.float32)
    assert torch.equal(triton_16bit.matmul(x[32:48], weight, BLOCK, 48, torch.float32), whole[32:48])
    assert torch.equal(triton_16bit.matmul(x, weight[8:], BLOCK, 40, torch.float32), whole[:, 8:])
    back = triton_16bit.matmul_backward(draw(64, 48, seed=2), weight, BLOCK, 40)
    assert torch.equal(triton_16bit.matmul_backward(draw(64, 48, seed=2)[16:32], weight, BLOCK, 40), back[16:32])


@pytest.mark.parametrize("shape", [(40, 24), (200, 136)], ids=["blocks apart", "a tile has all blocks"])
def test_weight_gradients_are_added_in_integers(shape):
    dy, x = draw(64, shape[0], whole=True), draw(64, shape[1], seed=1, whole=True)
    start = torch.randint(-(2**50), 2**50, shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    sums = {}
    for kernels in (plain, triton_16bit):
        total, peak = start.clone(), zeros()
        kernels.add_outer(total, peak, 2.0**32, dy, x, BLOCK, shape)
        sums[kernels] = total, peak
    for result, expected in zip(*sums.values(), strict=True):
        assert torch.equal(result, expected)
    assert not torch.equal(sums[plain][0], start)


def test_each_block_is_rounded_by_itself():
    """Two blocks of 0.375 in whole numbers: 0 + 0, not 1."""
    dy, x = zeros(32, 16).bfloat16(), zeros(32, 16).bfloat16()
    dy[[0, 16], 0], x[[0, 16], 0] = 0.375, 1.0
    for value, expected in ((0.375, 0), (0.5, 0), (0.625, 2), (1.5, 4), (2.5, 4), (-0.75, -2), (-2.5, -4)):
        dy[[0, 16], 0] = value
        total, peak = zeros(16, 16, dtype=torch.int64), zeros()
        triton_16bit.add_outer(total, peak, 1.0, dy, x, 16, (16, 16))
        assert int(total[0, 0]) == expected, value
        assert float(peak) == abs(value)


def test_a_non_finite_value_raises_the_peak():
    dy, x = draw(16, 16), draw(16, 16, seed=1)
    for value in (torch.nan, torch.inf):
        dy[3, 5] = value
        for add in (
            lambda total, peak: triton_16bit.add_outer(total, peak, 1.0, dy, x, 16, (16, 16)),
            lambda total, peak: triton_16bit.add_rows(total[0], peak, 1.0, dy),
            lambda total, peak: triton_16bit.add_rows(total, peak, 1.0, dy, torch.arange(16, device=DEVICE)),
        ):
            peak = zeros()
            add(zeros(16, 16, dtype=torch.int64), peak)
            assert float(peak) == torch.inf
    assert float(triton_16bit.largest(dy)) == torch.inf
