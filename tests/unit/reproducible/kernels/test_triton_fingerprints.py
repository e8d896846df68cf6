"""The kernel of fingerprints gives the numbers of the plain way, wherever it runs."""

import pytest
import torch

from workbench.reproducible.fingerprints import row_fingerprints
from workbench.reproducible.kernels import triton_fingerprints as kernel

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.bool: torch.int8}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1500), (7, 1024), (0, 4)], ids=str)
def test_as_the_plain_way(dtype, shape):
    drawn = torch.Generator().manual_seed(5)
    values_RC = torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype)
    rows_R = torch.randint(0, 2**40, shape[:1], generator=drawn)
    columns_C = torch.randint(0, 2**20, shape[1:], generator=drawn)
    said_R = kernel.row_fingerprints(values_RC.view(BITS[dtype]).to(DEVICE), rows_R.to(DEVICE), columns_C.to(DEVICE))
    assert said_R.tolist() == row_fingerprints(values_RC, rows_R, columns_C).tolist()
