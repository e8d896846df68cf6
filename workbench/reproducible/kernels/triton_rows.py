"""Row-wise operations, exact sums over rows, and fingerprints of rows, as Triton kernels.

A row is reduced inside one program, with the same assignment to threads for every row: the number of rows changes no
bits. Sums over rows are rounded to fixed point first, token by token, and added as integers.

Letters: T rows | D their width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.reproducible.kernels.triton_gemms import fixed, raise_peak, size

_WHOLE = tl.constexpr(4503599627370496.0)  # 2^52: float64 of this magnitude and above are integers


@triton.jit(do_not_specialize=["rows"])
def normalise(x, weight, y, rstd, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute y = weight * (x / rms(x)) per row, rounded to the dtype of x before and after the weight; 1 / rms(x)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    h = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    per_rms = tl.rsqrt(tl.sum(h * h, 1) / width + eps)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    unit = (h * per_rms[:, None]).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + place, (w[None, :] * unit).to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, per_rms, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def normalise_back(dy, x, rstd, weight, dx, total, peak, rows, width, scale, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Compute dx, and add the weight's gradient to integers: each token's part is rounded separately."""
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.int64)
    highest = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        g = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        per_rms = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        unit = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * per_rms
        leaf = g * unit.to(dx.dtype.element_ty).to(tl.float32)
        highest = tl.maximum(highest, size(leaf))
        sums += fixed(leaf, scale)
        g = g * w[None, :]
        mean = tl.sum(g * unit, 1) / width
        tl.store(dx + place, (per_rms * (g - unit * mean[:, None])).to(dx.dtype.element_ty), mask=inside)
    raise_peak(peak, tl.max(highest))
    tl.atomic_add(total + column, tl.sum(sums, 0), mask=column < width, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def add_columns(values, total, peak, rows, width, stride, scale, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[D] int64 += each row. Programs: columns x rows."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros((ROWS, WIDTH), tl.int64)
    highest = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(values + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
        highest = tl.maximum(highest, size(value.to(tl.float32)))
        sums += fixed(value.to(tl.float32), scale)
    raise_peak(peak, tl.max(highest))
    tl.atomic_add(total + column, tl.sum(sums, 0), mask=column < width, sem="relaxed")


@triton.jit
def add_at(values, index, total, peak, width, stride, scale, WIDTH: tl.constexpr):
    """[V, D] int64, row index[t] += row t; skipped if the index is negative. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(index + row).to(tl.int64)
    if at >= 0:
        highest = 0.0
        for start in range(0, width, WIDTH):
            column = start + tl.arange(0, WIDTH)
            value = tl.load(values + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
            highest = tl.maximum(highest, tl.max(size(value)))
            tl.atomic_add(total + at * width + column, fixed(value, scale), mask=column < width, sem="relaxed")
        raise_peak(peak, highest)


@triton.jit(do_not_specialize=["rows"])
def find_head_peaks(values, peaks, rows, heads, ROWS: tl.constexpr, WIDTH: tl.constexpr, width: tl.constexpr):
    """[H] the largest magnitude of each head's elements of [T, H, d]. Programs: rows x heads."""
    head = tl.program_id(1)
    column = tl.arange(0, WIDTH)
    highest = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        place = (row.to(tl.int64)[:, None] * heads + head) * width + column[None, :]
        highest = tl.maximum(highest, size(tl.load(values + place, mask=inside, other=0.0).to(tl.float32)))
    raise_peak(peaks + head, tl.max(highest))


@triton.jit(do_not_specialize=["elements"])
def add_by_head(values, total, scales, elements, heads, stride, width: tl.constexpr, SIZE: tl.constexpr):
    """Integers [T, H, d], rows ``stride`` apart, += values in multiples of 1 / scale of their head."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < elements
    within = place % (heads * width)
    value = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    into = total + place // (heads * width) * stride + within
    scale = tl.load(scales + within // width, mask=inside, other=1.0)
    tl.store(into, tl.load(into, mask=inside, other=0) + fixed(value, scale), mask=inside)


@triton.jit(do_not_specialize=["elements"])
def write_gradient(total, gradient, factor, elements, SIZE: tl.constexpr):
    """Multiply integers by a power of two, rounding to float64, to float32 and to the gradient's dtype."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < elements
    value = tl.load(total + place, mask=inside, other=0).to(tl.float64) * factor
    tl.store(gradient + place, value.to(tl.float32).to(gradient.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["elements"])
def find_peak(values, peak, elements, SIZE: tl.constexpr):
    """Largest magnitude of all elements."""
    highest = tl.zeros((SIZE,), tl.float32)
    for start in range(tl.program_id(0) * SIZE, elements, tl.num_programs(0) * SIZE):
        place = start + tl.arange(0, SIZE)
        highest = tl.maximum(highest, size(tl.load(values + place, mask=place < elements, other=0.0).to(tl.float32)))
    raise_peak(peak, tl.max(highest, 0))


@triton.jit(do_not_specialize=["elements"])
def add_squares(values, total, scale, elements, SIZE: tl.constexpr):
    """One integer += the square of every element, exact in float64, in multiples of 1 / scale; scale is a pointer."""
    per_unit = tl.load(scale)
    sums = tl.zeros((SIZE,), tl.int64)
    for start in range(tl.program_id(0) * SIZE, elements, tl.num_programs(0) * SIZE):
        place = start + tl.arange(0, SIZE)
        value = tl.load(values + place, mask=place < elements, other=0.0).to(tl.float64)
        square = value * value * per_unit
        sums += tl.where(square < _WHOLE, (square + _WHOLE) - _WHOLE, square).to(tl.int64)
    tl.atomic_add(total, tl.sum(sums, 0), sem="relaxed")


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
