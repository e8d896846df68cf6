"""GEMMs in the requested precision, independent of the process-wide default.

Letters: C rows of a chunk | V vocabulary (this rank's rows of the head) | D model dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def exact_float32(dtype: torch.dtype) -> Iterator[None]:
    """Disable TF32, which keeps 10 of 23 bits, for float32 GEMMs within this context.

    Args:
        dtype: of the operands; for other dtypes than float32 nothing changes.
    """
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    if dtype != torch.float32 or before == "ieee":
        yield
        return
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


def add_gemm_(weight_VD: Tensor, gradient_CV: Tensor, hidden_CD: Tensor, *, first: bool) -> None:
    """Compute ``weight_VD += gradient_CV.T @ hidden_CD``, or ``=`` for the first; summed in the dtype of weight_VD."""
    beta = 0 if first else 1
    if weight_VD.dtype == hidden_CD.dtype:
        torch.addmm(weight_VD, gradient_CV.T, hidden_CD, beta=beta, out=weight_VD)
    elif hidden_CD.is_cuda:
        torch.addmm(weight_VD, gradient_CV.T, hidden_CD, beta=beta, out_dtype=weight_VD.dtype, out=weight_VD)
    else:
        wide = weight_VD.dtype
        torch.addmm(weight_VD, gradient_CV.T.to(wide), hidden_CD.to(wide), beta=beta, out=weight_VD)
