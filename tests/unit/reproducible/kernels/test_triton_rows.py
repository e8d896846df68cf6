"""A row knows no other; sums over rows and fingerprints are those of the plain kernels, integer by integer."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.kernel_numbers import DEVICE, draw, far, zeros
from workbench.reproducible.fingerprints import row_fingerprints
from workbench.reproducible.kernels import plain, triton_16bit, triton_rows


@pytest.mark.parametrize(("rows", "width"), [(50, 48), (3, 2200)])
def test_norms(rows, width):
    x, weight, dy = draw(rows, width), draw(width, seed=1), draw(rows, width, seed=2)
    y, rstd = triton_16bit.norm(x, weight, 1e-6)
    expected_y, expected_rstd = plain.norm(x, weight, 1e-6)
    assert far(y, expected_y) < 1e-3
    assert far(rstd, expected_rstd) < 1e-6
    total, peak = zeros(width, dtype=torch.int64), zeros()
    dx = triton_16bit.norm_back(dy, x, rstd, weight, total, peak, 2.0**32)
    expected_total, expected_peak = torch.zeros_like(total), zeros()
    expected_dx = plain.norm_back(dy, x, rstd, weight, expected_total, expected_peak, 2.0**32)
    assert far(dx, expected_dx) < 1e-3
    assert torch.equal(total, expected_total)
    assert torch.equal(peak, expected_peak)
    some, some_rstd = triton_16bit.norm(x[1:3], weight, 1e-6)
    assert torch.equal(some, y[1:3])
    assert torch.equal(triton_16bit.norm_back(dy[1:3], x[1:3], some_rstd, weight, total, peak, 2.0**32), dx[1:3])


@pytest.mark.parametrize("indexed", [False, True])
def test_rows_are_added_in_integers(indexed):
    rows = draw(40, 72)[:, :70]
    index = torch.randint(-1, 9, (40,), generator=torch.Generator().manual_seed(1)).to(DEVICE) if indexed else None
    sums = []
    for kernels in (plain, triton_16bit):
        total, peak = zeros(*((9, 70) if indexed else (70,)), dtype=torch.int64), zeros()
        kernels.add_rows(total, peak, 2.0**40, rows, index)
        sums.append(total)
    assert torch.equal(*sums)
    assert sums[0].any()


def test_gradients_of_keys_and_values():
    values = draw(37, 3, 8)
    peak = torch.tensor([0.0, 100.0, 0.0], device=DEVICE)
    triton_16bit.raise_head_peaks(peak, values)
    assert torch.equal(peak, values.float().abs().amax((0, 2)).maximum(torch.tensor([0.0, 100.0, 0.0], device=DEVICE)))
    scale, sums = torch.tensor([2.0, 2.0**10, 2.0**20], device=DEVICE), []
    for kernels in (plain, triton_16bit):
        sums.append(torch.ones(37, 6, 8, dtype=torch.int64, device=DEVICE))
        kernels.add_scaled(sums[-1][:, 3:], scale, values)
    assert torch.equal(*sums)
    assert (sums[1][:, :3] == 1).all()


def test_gradients_and_norms_match_the_plain_kernels():
    total = torch.randint(-(2**50), 2**50, (33, 70), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(*(kernels.to_gradient(total, 2.0**-40, dtype) for kernels in (plain, triton_16bit)))
    values = draw(9000)
    assert torch.equal(*(kernels.largest(values) for kernels in (plain, triton_16bit)))
    for power in (44, 3, 60):
        scale = torch.tensor(2.0**power, dtype=torch.float64, device=DEVICE)
        assert torch.equal(*(kernels.sum_of_squares(values, scale) for kernels in (plain, triton_16bit)))
    assert float(triton_16bit.largest(values[:0])) == 0
    assert int(triton_16bit.sum_of_squares(values[:0], scale)) == 0
    assert triton_16bit.to_gradient(total[:0], 1.0, torch.bfloat16).shape == (0, 70)


BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.bool: torch.int8}


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1500), (7, 1024), (0, 4)], ids=str)
def test_fingerprints_as_the_plain_way(dtype, shape):
    drawn = torch.Generator().manual_seed(5)
    values_RC = torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype)
    rows_R = torch.randint(0, 2**40, shape[:1], generator=drawn)
    columns_C = torch.randint(0, 2**20, shape[1:], generator=drawn)
    said_R = triton_rows.row_fingerprints(
        values_RC.view(BITS[dtype]).to(DEVICE), rows_R.to(DEVICE), columns_C.to(DEVICE)
    )
    assert said_R.tolist() == row_fingerprints(values_RC, rows_R, columns_C).tolist()
