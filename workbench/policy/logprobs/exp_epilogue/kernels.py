"""A GEMM whose logits never leave the chip, and the small kernels of forward around it.

The GEMM writes exponentials instead of logits. With z the logits as they enter the softmax and c one number for each
row, the target's own logit:

    E_v = exp(z_v - c)      S = sum_v E_v      X = sum_v E_v (z_v - c)      Q = sum_v z_v^2
    logprob = -log S        logsumexp = c + log S        entropy = log S - X / S

so that neither a maximum nor a second pass is needed: bfloat16 has the range of float32, and E_target is 1. Inside,
exponents are in bits (base 2), like the hardware's exponential. Sums of each tile of columns are stored separately and
added in a fixed order: no atomics, so a row's outputs are bitwise independent of chunking and of its neighbours.

Letters: C rows of a chunk | V columns of the head | D model dimension | N tiles of columns | F sums of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

LIMIT = 60.0
"""A row whose sum of exponentials reaches exp(LIMIT) has overflowed: its target is less likely than exp(-LIMIT)."""

_BITS = tl.constexpr(1.4426950408889634)  # per nat
_NATS = tl.constexpr(0.6931471805599453)  # per bit
_LIMIT = tl.constexpr(LIMIT)
_NOTHING = tl.constexpr(-1e30)  # stands for a logit of -inf: probability 0, and 0 times it is 0, not NaN
_SMALLEST = tl.constexpr(-125.0)  # bits, below which an exponential is stored as its exponent, with EXPONENTS


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * _BITS)) + 1.0)


@triton.jit
def _logits(dots, bias, logit_scale, soft_cap, per_temperature, BIAS: tl.constexpr, CAP: tl.constexpr):
    """Logits as they enter the softmax, in the units of ``per_temperature``."""
    if BIAS:
        dots += bias
    if CAP:
        return _tanh(dots * (logit_scale / soft_cap)) * (soft_cap * per_temperature)
    return dots * (logit_scale * per_temperature)


@triton.jit(do_not_specialize=["first_token"], do_not_specialize_on_alignment=["targets", "temperatures"])
def target_logits(
    hidden,
    weight,
    bias,
    targets,
    temperatures,
    out,
    columns,
    depth,
    hidden_stride,
    weight_stride,
    first_token,
    logit_scale,
    soft_cap,
    temperature,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[C] logit of each row's target, in nats; 0 if another rank has it. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row) - first_token
    here = (target >= 0) & (target < columns)
    target = tl.where(here, target, 0).to(tl.int64)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, depth, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = (places < depth) & here
        h = tl.load(hidden + row * hidden_stride + places, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + target * weight_stride + places, mask=inside, other=0.0).to(tl.float32)
        products += h * w
    b = 0.0
    if BIAS:
        b = tl.load(bias + target, mask=here, other=0.0).to(tl.float32)
    if PER_ROW:
        temperature = tl.load(temperatures + row)
    logit = _logits(tl.sum(products, 0), b, logit_scale, soft_cap, 1.0 / temperature, BIAS, CAP)
    tl.store(out + row, tl.where(here, logit, 0.0))


@triton.jit
def _emit(
    dots,
    out,
    bias,
    shift,
    per_temperature,
    row,
    column,
    columns,
    logit_scale,
    soft_cap,
    WIDTH: tl.constexpr,
    STORE: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
):
    """Exponentials of a tile of dot products, and their sums over its columns."""
    places = column + tl.arange(0, WIDTH)
    b = 0.0
    if BIAS:
        b = tl.load(bias + places, mask=places < columns, other=0.0).to(tl.float32)
        b = tl.where(b < _NOTHING, _NOTHING, b)[None, :]  # NaN stays NaN, unlike in a maximum
    logits = _logits(dots, b, logit_scale, soft_cap, per_temperature, BIAS, CAP)
    bits = logits - shift
    if column + WIDTH > columns:
        bits = tl.where((places < columns)[None, :], bits, _NOTHING)
    exponentials = tl.exp2(bits)
    if STORE:
        kept = tl.where(bits < _SMALLEST, bits, exponentials) if EXPONENTS else exponentials
        out.store([row, column], kept.to(out.dtype))
    total = tl.sum(exponentials, 1)
    weighted = total
    squares = total
    if ENTROPY:
        weighted = tl.sum(exponentials * bits, 1)
    if SQUARES:
        squares = tl.sum(tl.where(bits > 1e-5 * _NOTHING, logits * logits, 0.0), 1)
    return total, weighted, squares


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["temperatures"])
def exp_gemm(
    hidden,
    weight,
    out,
    bias,
    shifts,
    temperatures,
    sums,
    rows,
    columns,
    depth,
    logit_scale,
    soft_cap,
    temperature,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PRECISION: tl.constexpr,
    STORE: tl.constexpr,
    EXPONENTS: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Exponentials of shifted logits, [C, V], and the sums of every tile, [F, N, C]: S, X in bits, Q in bits^2.

    Persistent programs process tiles in an order in which neighbours share operands: GROUP tiles of rows, then the
    next tile of columns. Exponentials are computed for half a tile at a time, in half the registers and shared memory.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    width = GROUP * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        group = tile // width
        tall = tl.minimum(row_tiles - group * GROUP, GROUP)
        row = (group * GROUP + (tile % width) % tall) * ROWS
        column_tile = (tile % width) // tall
        column = column_tile * COLUMNS
        dots = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            h = hidden.load([row, step * DEPTH])
            w = weight.load([column, step * DEPTH])
            dots = tl.dot(h, w.T, dots, input_precision=PRECISION)
        places = row + tl.arange(0, ROWS)
        inside = places < rows
        shift = tl.load(shifts + places, mask=inside, other=0.0)[:, None] * _BITS
        if PER_ROW:
            per_temperature = (1.0 / tl.load(temperatures + places, mask=inside, other=1.0))[:, None] * _BITS
        else:
            per_temperature = 1.0 / temperature * _BITS
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(dots, (ROWS, 2, HALF)), (0, 2, 1)))
        total, weighted, squares = _emit(
            left,
            out,
            bias,
            shift,
            per_temperature,
            row,
            column,
            columns,
            logit_scale,
            soft_cap,
            HALF,
            STORE,
            EXPONENTS,
            ENTROPY,
            SQUARES,
            BIAS,
            CAP,
        )
        more, more_weighted, more_squares = _emit(
            right,
            out,
            bias,
            shift,
            per_temperature,
            row,
            column + HALF,
            columns,
            logit_scale,
            soft_cap,
            HALF,
            STORE,
            EXPONENTS,
            ENTROPY,
            SQUARES,
            BIAS,
            CAP,
        )
        total += more
        weighted += more_weighted
        squares += more_squares
        place = sums + column_tile.to(tl.int64) * rows + places
        tl.store(place, total, mask=inside)
        if ENTROPY:
            place += column_tiles.to(tl.int64) * rows
            tl.store(place, weighted, mask=inside)
        if SQUARES:
            place += column_tiles.to(tl.int64) * rows
            tl.store(place, squares, mask=inside)


@triton.jit
def _add_tiles(sums, totals, kind, places, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """One of F sums of [F, N, C] over the tiles, in a fixed order; stored in [F, C] and returned."""
    partial = tl.zeros((TILES, ROWS), tl.float32)
    for start in tl.range(0, tiles, TILES, loop_unroll_factor=4):  # four loads under way
        tile = start + tl.arange(0, TILES)
        inside = (tile < tiles)[:, None] & (places < rows)[None, :]
        place = sums + (kind * tiles + tile).to(tl.int64)[:, None] * rows + places[None, :]
        partial += tl.load(place, mask=inside, other=0.0)
    total = tl.sum(partial, 0)
    tl.store(totals + kind * rows + places, total, mask=places < rows)
    return total


@triton.jit(do_not_specialize=["rows"])
def add_tiles(sums, totals, rows, tiles, ROWS: tl.constexpr, TILES: tl.constexpr):
    """Sum [F, N, C] -> [F, C]. Programs: blocks of rows x F."""
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _add_tiles(sums, totals, tl.program_id(1), places, rows, tiles, ROWS, TILES)


@triton.jit(do_not_specialize=["rows"])
def write_outputs(
    sums,
    totals,
    shifts,
    logprobs,
    entropy,
    logsumexp,
    mean_squares,
    overflowed,
    rows,
    tiles,
    vocabulary,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Head outputs from each row's sums, [F, N, C], whose totals are stored; zeros if it overflowed, NaN for NaN.

    Sums over all ranks are of one tile, and may be their own totals.
    """
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = places < rows
    total = _add_tiles(sums, totals, 0, places, rows, tiles, ROWS, TILES)
    shift = tl.load(shifts + places, mask=inside, other=0.0)
    fine = total < tl.exp(_LIMIT)  # false for NaN too
    instead = tl.where(total == total, 0.0, total)
    log_total = tl.log(total)
    tl.store(overflowed + places, tl.where(fine, 0, 1).to(tl.int8), mask=inside)
    # the target's exponential, by another order of sums than the shift, is 1 up to rounding
    tl.store(logprobs + places, tl.where(fine, tl.minimum(-log_total, 0.0), instead), mask=inside)
    tl.store(logsumexp + places, tl.where(fine, shift + log_total, instead), mask=inside)
    if ENTROPY:
        mean = _add_tiles(sums, totals, 1, places, rows, tiles, ROWS, TILES) * _NATS / total
        tl.store(entropy + places, tl.where(fine, tl.maximum(log_total - mean, 0.0), instead), mask=inside)
    if SQUARES:
        squares = _add_tiles(sums, totals, 1 + ENTROPY, places, rows, tiles, ROWS, TILES) * (_NATS * _NATS)
        tl.store(mean_squares + places, tl.where(fine, squares / vocabulary, instead), mask=inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["temperatures"])
def write_overflowed_outputs(
    hidden,
    weight,
    bias,
    shifts,
    temperatures,
    overflowed,
    logprobs,
    entropy,
    logsumexp,
    mean_squares,
    rows,
    columns,
    vocabulary,
    depth,
    hidden_stride,
    weight_stride,
    logit_scale,
    soft_cap,
    temperature,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    BIAS: tl.constexpr,
    CAP: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Head outputs of overflowed rows, by an online softmax: slow, row by row; no work without overflow."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    flags = first + tl.arange(0, ROWS)
    if tl.max(tl.load(overflowed + flags, mask=flags < rows, other=0), 0) != 0:
        for number in range(ROWS):
            place = first + number
            lost = tl.load(overflowed + place, mask=place < rows, other=0) != 0
            instead = tl.load(logprobs + place, mask=lost, other=0.0)
            if lost & (instead == instead):
                row = hidden + place * hidden_stride
                if PER_ROW:
                    temperature = tl.load(temperatures + place)
                highest = _NOTHING
                total = 0.0
                weighted = 0.0
                squares = 0.0
                for column in range(0, columns, COLUMNS):
                    places = column + tl.arange(0, COLUMNS)
                    inside = places < columns
                    dots = tl.zeros((COLUMNS,), tl.float32)
                    for start in range(0, depth, DEPTH):
                        deep = start + tl.arange(0, DEPTH)
                        h = tl.load(row + deep, mask=deep < depth, other=0.0).to(tl.float32)
                        w = tl.load(
                            weight + places.to(tl.int64)[:, None] * weight_stride + deep[None, :],
                            mask=inside[:, None] & (deep < depth)[None, :],
                            other=0.0,
                        ).to(tl.float32)
                        dots += tl.sum(w * h[None, :], 1)
                    b = 0.0
                    if BIAS:
                        b = tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
                        b = tl.where(b < _NOTHING, _NOTHING, b)
                    logits = _logits(dots, b, logit_scale, soft_cap, 1.0 / temperature, BIAS, CAP)
                    logits = tl.where(inside, logits, _NOTHING)
                    above = tl.maximum(highest, tl.max(logits, 0))
                    raised = above - highest
                    shrunk = tl.exp(-raised)
                    exponentials = tl.exp(logits - above)
                    weighted = shrunk * (weighted - raised * total) + tl.sum(exponentials * (logits - above), 0)
                    total = shrunk * total + tl.sum(exponentials, 0)
                    squares += tl.sum(tl.where(logits > 1e-5 * _NOTHING, logits * logits, 0.0), 0)
                    highest = above
                # a row whose every logit is -inf has no distribution
                log_total = tl.where(highest > 1e-5 * _NOTHING, tl.log(total), float("nan"))
                logprob = tl.load(shifts + place) - highest - log_total
                tl.store(logprobs + place, tl.where(logprob > 0.0, 0.0, logprob))
                tl.store(logsumexp + place, highest + log_total)
                if ENTROPY:
                    spread = log_total - weighted / total
                    tl.store(entropy + place, tl.where(spread < 0.0, 0.0, spread))
                if SQUARES:
                    tl.store(mean_squares + place, squares / vocabulary)


def unsupported_reason(dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why this engine cannot compute with such operands; None if it can."""
    if dtype not in DTYPES:
        return f"operands are {dtype}; the kernels sum in float32"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"compute capability {major}.{minor}; the kernels need 8.0"
    if not isinstance(exp_gemm, InterpretedFunction):
        return f"operands are on {device.type}; Triton needs CUDA, or its interpreter (TRITON_INTERPRET=1)"
    return None
