"""Triton kernel of `row_sums.sum_rows`: a program adds the parts of one row, for some of its values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Values of a row that one program adds: those of 8 heads of 128."""


def add_parts(parts_nHd: Tensor, parts_kp: Tensor) -> Tensor:
    """[k, H, d] float32; see `row_sums.sum_rows`. Contiguous parts."""
    width, (count, most) = parts_nHd[0].numel(), parts_kp.shape
    sums_kHd = parts_nHd.new_empty(count, *parts_nHd.shape[1:], dtype=torch.float32)
    _add_parts[(count, triton.cdiv(width, _BLOCK))](parts_nHd, parts_kp, sums_kHd, width, MOST=most, BLOCK=_BLOCK)
    return sums_kHd


@triton.jit
def _add_parts(parts, places, sums, width, MOST: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(MOST):
        place = tl.load(places + row * MOST + number).to(tl.int64)
        total += tl.load(parts + place * width + at, mask=(at < width) & (place >= 0), other=0.0).to(tl.float32)
    tl.store(sums + row * width + at, total, mask=at < width)
