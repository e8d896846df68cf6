"""Sums of the parts of rows against `index_add_` in float64."""

import pytest
import torch

from workbench.sharding.attention.kernels.row_sums import parts_of_rows, sum_rows

ROWS = [0, 3, 1, 3, 3, 0, 5]


def expected(parts_nHd, rows_n, count):
    whole = torch.zeros(count, *parts_nHd.shape[1:], dtype=torch.float64)
    return whole.index_add_(0, rows_n, parts_nHd.double())


def test_parts_are_in_order_and_rows_without_any_are_empty():
    assert parts_of_rows(torch.tensor(ROWS), 7).tolist() == [
        [0, 5, -1],
        [2, -1, -1],
        [-1, -1, -1],
        [1, 3, 4],
        [-1, -1, -1],
        [6, -1, -1],
        [-1, -1, -1],
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sums_are_those_of_index_add(dtype):
    rows_n, parts_nHd = torch.tensor(ROWS), torch.randn(len(ROWS), 2, 3).to(dtype)
    sums_kHd = sum_rows(parts_nHd, parts_of_rows(rows_n, 7))
    assert sums_kHd.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(sums_kHd.double(), expected(parts_nHd, rows_n, 7), rtol=1e-6, atol=1e-6)
