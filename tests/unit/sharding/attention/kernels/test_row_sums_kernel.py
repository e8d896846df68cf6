"""The kernel that sums the parts of rows, against `index_add_` in float64; needs a GPU."""

import pytest
import torch

from tests.unit.sharding.attention.kernels.test_row_sums import expected
from workbench.sharding.attention.kernels.row_sums import parts_of_rows, sum_rows


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4, 128), (8, 128), (3, 40), (16, 128)], ids=str)
def test_sums_of_the_kernel(shape):
    rows_n = torch.randint(0, 700, (2000,))
    parts_nHd = torch.randn(2000, *shape, dtype=torch.bfloat16)
    sums_kHd = sum_rows(parts_nHd.cuda(), parts_of_rows(rows_n, 701).cuda())
    torch.testing.assert_close(sums_kHd.cpu().double(), expected(parts_nHd, rows_n, 701), rtol=1e-6, atol=1e-5)
    assert torch.equal(sums_kHd, sum_rows(parts_nHd.cuda(), parts_of_rows(rows_n, 701).cuda()))
