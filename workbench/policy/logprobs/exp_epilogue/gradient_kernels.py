"""The kernels of backward: exponentials to gradients, and gradients times a factor.

`scale_in_place` and `add_in_place` read the factor on the device first; scaling by 1 returns at once.

Letters: C rows of a chunk | V columns of the head | D model dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from workbench.policy.logprobs.exp_epilogue.kernels import _NATS, _NOTHING

BLOCK = 4096
PROGRAMS = 1056  # eight on each of 132 multiprocessors


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """log2 of numbers that are not negative, -123 for 0; FAST is one instruction, accurate to 22 bits."""
    x = tl.maximum(x, 1e-37)
    if FAST:
        return libdevice.fast_log2f(x)
    return tl.log2(x)


@triton.jit
def _scale_row(hidden, scaled, scales, row, scale, depth, hidden_stride, BLOCK: tl.constexpr):
    """Multiply a row of hidden states by its scale, and store the scale for the gradient of hidden."""
    tl.store(scales + row, scale)
    for start in range(0, depth, BLOCK):
        places = start + tl.arange(0, BLOCK)
        h = tl.load(hidden + row * hidden_stride + places, mask=places < depth, other=0.0).to(tl.float32)
        # a row without gradient may be not finite, and 0 * inf would be NaN
        product = tl.where(scale == 0.0, 0.0, h * scale)
        tl.store(scaled + row * depth + places, product.to(scaled.dtype.element_ty), mask=places < depth)


@triton.jit(
    do_not_specialize=["first_token"],
    do_not_specialize_on_alignment=["targets", "temperatures", "logprob_gradients", "logsumexp_gradients"],
)
def fold_target(
    exponentials,
    hidden,
    scaled,
    scales,
    totals,
    targets,
    temperatures,
    overflowed,
    logprob_gradients,
    logsumexp_gradients,
    columns,
    depth,
    stride,
    hidden_stride,
    first_token,
    logit_scale,
    temperature,
    LOGPROB: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn each row of exponentials into its gradient, up to a scale, by changing one element.

    With k = g_logsumexp - g_logprob:  dz_v = (k / S) (E_v + 1[v = target] g_logprob S / k).
    The scale, times dz/d(dot product), is multiplied into a copy of the hidden row. One program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(totals + row)
    to_logprob = 0.0
    to_logsumexp = 0.0
    if LOGPROB:
        to_logprob = tl.load(logprob_gradients + row).to(tl.float32)
    if LOGSUMEXP:
        to_logsumexp = tl.load(logsumexp_gradients + row).to(tl.float32)
    if PER_ROW:
        temperature = tl.load(temperatures + row)
    slope = to_logsumexp - to_logprob
    # If the two cancel, only the target's element is left: a negligible slope keeps it finite.
    least = tl.abs(to_logprob) * tl.maximum(total * 1e-36, 1e-10)
    slope = tl.where(tl.abs(slope) < least, least, slope)
    lost = tl.load(overflowed + row) != 0
    scale = slope / total * (logit_scale / temperature)
    scale = tl.where(lost | (slope == 0.0), 0.0, scale)
    place = exponentials + row * stride
    target = tl.load(targets + row) - first_token
    here = (target >= 0) & (target < columns)
    own = tl.load(place + target, mask=here, other=0.0).to(tl.float32)  # under way while the hidden row is scaled
    _scale_row(hidden, scaled, scales, row, scale, depth, hidden_stride, BLOCK)
    if lost:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(place + column, tl.zeros((BLOCK,), place.dtype.element_ty), mask=column < columns)
    else:
        own += tl.where(slope == 0.0, 0.0, to_logprob / slope * total)
        tl.store(place + target, own.to(place.dtype.element_ty), mask=here)


@triton.jit(
    do_not_specialize=["rows", "first_token"],
    do_not_specialize_on_alignment=[
        "targets",
        "temperatures",
        "logprob_gradients",
        "logsumexp_gradients",
        "entropy_gradients",
        "square_gradients",
    ],
)
def write_gradient(
    exponentials,
    gradient,
    hidden,
    scaled,
    scales,
    totals,
    shifts,
    targets,
    temperatures,
    overflowed,
    logprob_gradients,
    logsumexp_gradients,
    entropy_gradients,
    square_gradients,
    rows,
    columns,
    vocabulary,
    depth,
    stride,
    hidden_stride,
    first_token,
    logit_scale,
    soft_cap,
    temperature,
    LOGPROB: tl.constexpr,
    LOGSUMEXP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    EXPONENTS: tl.constexpr,
    CAP: tl.constexpr,
    PER_ROW: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Overwrite each row of exponentials with its gradient, up to a scale, if one element is not enough: one pass.

        dz_v = p_v (g_logsumexp - g_logprob - g_entropy (z_v - mean z)) + 1[v = target] g_logprob + 2 g_squares z_v / V
        d(dot product)_v = dz_v (1 - (z_v temperature / soft_cap)^2) logit_scale / temperature

    The scale is the sum of the incoming gradients' magnitudes: written values are of order 1. Programs: rows x blocks
    of columns, the first of which scales the hidden row; ``gradient`` is the same memory in the dtype of the operands.
    """
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    target = tl.load(targets + row) - first_token
    total = tl.load(totals + row)
    shift = tl.load(shifts + row)
    mean = 0.0
    to_logprob = 0.0
    to_logsumexp = 0.0
    to_entropy = 0.0
    to_squares = 0.0
    if LOGPROB:
        to_logprob = tl.load(logprob_gradients + row).to(tl.float32)
    if LOGSUMEXP:
        to_logsumexp = tl.load(logsumexp_gradients + row).to(tl.float32)
    if ENTROPY:
        to_entropy = tl.load(entropy_gradients + row).to(tl.float32)
        mean = tl.load(totals + rows + row) * _NATS / total
    if SQUARES:
        to_squares = tl.load(square_gradients + row).to(tl.float32)
    if PER_ROW:
        temperature = tl.load(temperatures + row)
    size = tl.abs(to_logprob) + tl.abs(to_logsumexp) + tl.abs(to_entropy) + tl.abs(to_squares)
    lost = (tl.load(overflowed + row) != 0) | (size == 0.0)
    # no branch before the load: rows without a gradient are rare, and waiting for the flag would delay every row
    value = tl.load(exponentials + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    bits = _log2(value, FAST)
    if EXPONENTS:
        bits = tl.where(value < 0.0, value, bits)
        value = tl.maximum(value, 0.0)
    per_size = 1.0 / size
    per_total = per_size / total
    # p_v (slope - g_entropy (z_v - mean)) / size, in two products
    dz = value * (per_total * (to_logsumexp - to_logprob + to_entropy * mean) - bits * (per_total * to_entropy * _NATS))
    if (target >= block * BLOCK) & (target < block * BLOCK + BLOCK):
        dz += tl.where(column == target, to_logprob * per_size, 0.0)
    if SQUARES:
        pull = to_squares * per_size * 2.0 / vocabulary
        dz += tl.where(bits > 1e-5 * _NOTHING, pull * (bits * _NATS + shift), 0.0)
    if CAP:
        bent = (bits * _NATS + shift) * (temperature / soft_cap)
        dz *= 1.0 - bent * bent
    if lost:
        dz = tl.zeros((BLOCK,), tl.float32)
    tl.store(gradient + row * stride + column, dz.to(gradient.dtype.element_ty), mask=inside)
    if block == 0:
        scale = tl.where(lost, 0.0, size * (logit_scale / temperature))
        _scale_row(hidden, scaled, scales, row, scale, depth, hidden_stride, DEPTH)


@triton.jit
def scale_rows(gradient, scales, depth, stride, depth_stride, BLOCK: tl.constexpr):
    """Multiply each row by its scale in place: one read and one write, without torch's casts. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    for start in range(0, depth, BLOCK):
        places = start + tl.arange(0, BLOCK)
        place = gradient + row * stride + places.to(tl.int64) * depth_stride
        value = tl.load(place, mask=places < depth, other=0.0).to(tl.float32)
        tl.store(place, (value * scale).to(gradient.dtype.element_ty), mask=places < depth)


@triton.jit(do_not_specialize=["rows"])
def add_columns(
    gradient, scales, out, rows, columns, stride, FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """[V] += sum over rows of scale * gradient: the gradient of a bias. One program per block of columns."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        value = tl.load(gradient + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
        total += tl.sum(value.to(tl.float32) * scale[:, None], 0)
    if not FIRST:
        total += tl.load(out + column, mask=column < columns, other=0.0)
    tl.store(out + column, total, mask=column < columns)


@triton.jit
def _scale(values, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by == 1.0:
        return
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        old = tl.load(values + at, mask=at < count)
        tl.store(values + at, (old.to(tl.float32) * by).to(values.dtype.element_ty), mask=at < count)


@triton.jit
def _add(into, values, factor, count, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        old = tl.load(into + at, mask=at < count).to(tl.float32)
        more = tl.load(values + at, mask=at < count).to(tl.float32)
        tl.store(into + at, (old + more * by).to(into.dtype.element_ty), mask=at < count)


def scale_in_place(values: Tensor, factor: Tensor) -> None:
    """Multiply every element."""
    _scale[(PROGRAMS,)](values, factor, values.numel(), BLOCK=BLOCK)


def add_in_place(into: Tensor, values: Tensor, factor: Tensor) -> None:
    """Add ``factor`` times every element."""
    _add[(PROGRAMS,)](into, values, factor, into.numel(), BLOCK=BLOCK)
