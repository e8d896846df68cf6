"""Row-invariant GEMMs, and the exact sum of weight gradients, as Triton kernels.

One kernel serves any number of rows: the tile and the order in which the depth is summed are the same for every
element, so that a row's bits do not depend on its neighbours or on the number of local columns. The host does not loop
over blocks. The gradient of a weight is one kernel too: each program multiplies block after block of tokens, rounds
each block's product to fixed point, and adds it to integers in registers, which are written to memory once.

Letters: T tokens | N rows of a weight (its outputs) | K columns of a weight (its inputs).
"""

from __future__ import annotations

import triton
import triton.language as tl

_EXACT = tl.constexpr(8388608.0)  # 2^23: float32 of this magnitude and above are integers


@triton.jit
def fixed(x, scale):
    """Round float32 to the nearest multiple of 1 / scale (a power of two), ties to even, as int64."""
    x = x * scale
    shift = tl.where(x < 0.0, -_EXACT, _EXACT)
    return tl.where(tl.abs(x) < _EXACT, (x + shift) - shift, x).to(tl.int64)


@triton.jit
def size(x):
    """|x|, with infinity for NaN, which maxima would drop."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def raise_peak(peak, value):
    """Atomic maximum of nonnegative floats as integers: their bits have the same order."""
    tl.atomic_max(peak, value.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x,
    weight,
    out,
    rows,
    columns,
    depth,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BACK: tl.constexpr,
):
    """[T, columns] = x @ weight.T, or x @ weight (``BACK``); sums in float32 in the order of the depth.

    Persistent programs process tiles in an order in which neighbours share operands: GROUP tiles of rows, then the
    next tile of columns. Half a tile is stored at a time, in half the shared memory.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    width = GROUP * column_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        group = tile // width
        tall = tl.minimum(row_tiles - group * GROUP, GROUP)
        row = (group * GROUP + (tile % width) % tall) * ROWS
        column = ((tile % width) // tall) * COLUMNS
        dots = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            a = x.load([row, step * DEPTH])
            if BACK:
                dots = tl.dot(a, weight.load([step * DEPTH, column]), dots)
            else:
                dots = tl.dot(a, weight.load([column, step * DEPTH]).T, dots)
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(dots, (ROWS, 2, HALF)), (0, 2, 1)))
        out.store([row, column], left.to(out.dtype))
        out.store([row, column + HALF], right.to(out.dtype))


@triton.jit(do_not_specialize=["blocks", "parts"])
def add_outer_products(
    dy,
    x,
    total,
    peak,
    rows,
    columns,
    blocks,
    parts,
    stride,
    scale,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """[N, K] int64 += for each block of tokens: dy.T @ x, rounded to multiples of 1 / scale.

    A program computes one tile of every ``parts``-th block. Integer sums do not depend on the order, so that neither
    ``parts`` nor atomics change the result.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    tiles = row_tiles * column_tiles
    part = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    width = GROUP * column_tiles
    group = tile // width
    tall = tl.minimum(row_tiles - group * GROUP, GROUP)
    row = (group * GROUP + (tile % width) % tall) * ROWS
    column = ((tile % width) // tall) * COLUMNS
    sums = tl.zeros((ROWS, COLUMNS), tl.int64)
    highest = 0.0
    for block in range(part, blocks, parts):
        dots = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(BLOCK // DEPTH):
            token = block * BLOCK + step * DEPTH
            dots = tl.dot(dy.load([token, row]).T, x.load([token, column]), dots)
        highest = tl.maximum(highest, tl.max(size(dots)))
        sums += fixed(dots, scale)
    raise_peak(peak, highest)
    down = row + tl.arange(0, ROWS)
    along = column + tl.arange(0, COLUMNS)
    place = total + down.to(tl.int64)[:, None] * stride + along[None, :]
    inside = (down < rows)[:, None] & (along < columns)[None, :]
    if parts == 1:
        tl.store(place, tl.load(place, mask=inside, other=0) + sums, mask=inside)
    else:
        tl.atomic_add(place, sums, mask=inside, sem="relaxed")
