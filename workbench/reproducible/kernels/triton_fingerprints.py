"""Fingerprints on a GPU: every element is read once. Integers, so the results equal those of any other device.

Letters: R rows | C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_COLUMNS = 1024


def row_fingerprints(bits_RC: Tensor, rows_R: Tensor, columns_C: Tensor) -> Tensor:
    """See `workbench.reproducible.fingerprints.row_fingerprints`; takes contiguous bits as signed integers.

    Shapes: [R, C], [R], [C] -> [R] long.
    """
    sums_R = torch.empty(len(rows_R), dtype=torch.long, device=bits_RC.device)
    if len(rows_R):
        _row_kernel[(len(rows_R),)](
            bits_RC, rows_R.contiguous(), columns_C.contiguous(), sums_R, bits_RC.shape[1], COLUMNS=_COLUMNS
        )
    return sums_R


@triton.jit
def _row_kernel(bits_RC, rows_R, columns_C, sums_R, columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(rows_R + row)
    total = tl.zeros([COLUMNS], tl.uint64)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < columns
        bits = tl.load(bits_RC + row * columns + column, mask=inside, other=0).to(tl.int64).to(tl.uint64)
        places = (place + tl.load(columns_C + column, mask=inside, other=0)).to(tl.uint64)
        number = bits + places * _GOLDEN
        number = (number ^ (number >> 30)) * _FIRST
        number = (number ^ (number >> 27)) * _SECOND
        total += tl.where(inside, number ^ (number >> 31), 0)
    tl.store(sums_R + row, tl.sum(total, 0).to(tl.int64))
