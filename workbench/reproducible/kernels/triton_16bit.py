"""Canonical pieces of a network in bfloat16 or float16, as Triton kernels: one launch for all blocks.

Same functions and semantics as `plain`, with other bits.

Letters: T tokens | D width | N rows of a weight | K columns of a weight | V vocabulary.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.policy.logprobs.from_logits_kernels import TritonPasses
from workbench.reproducible.kernels import flash, plain, triton_gemms, triton_rows

NAME = "triton"
DTYPES = (torch.bfloat16, torch.float16)
elementwise, elementwise_back = plain.elementwise, plain.elementwise_back
_LINE = 8
"""Elements: rows begin at multiples of 16 bytes."""


class _Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    at_once: int = 1


def refusal(dtype: torch.dtype, device: torch.device, block: int) -> str | None:
    """Reason why these kernels cannot compute blocks of this many tokens of a dtype on a device; None if they can."""
    if dtype not in DTYPES:
        return f"operands are {dtype}; the kernels take bfloat16 and float16"
    if block % 16:
        return f"blocks of {block} tokens; the kernels take multiples of 16"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 9 else f"compute capability {major}.{minor}; the kernels need 9.0"
    if not isinstance(triton_gemms.multiply, InterpretedFunction):
        return f"operands are on {device.type}; Triton needs CUDA, or its interpreter (TRITON_INTERPRET=1)"
    return None


def rows_of_logits(block: int) -> int:
    """Return the number of tokens whose logits are computed at a time: few, because no row depends on the others."""
    return min(block, 512)


def matmul(x_TK: Tensor, weight_NK: Tensor, block: int, width: int, out_dtype: torch.dtype | None = None) -> Tensor:
    """[T, N] x @ weight.T, summed in float32 and rounded once.

    An element's bits depend on its row, its column and their depth, so that ``block`` and ``width`` are not needed.
    """
    return _product(x_TK, weight_NK, len(weight_NK), out_dtype, back=False)


def matmul_backward(
    dy_TN: Tensor, weight_NK: Tensor, block: int, width: int, out_dtype: torch.dtype | None = None
) -> Tensor:
    """[T, K] dy @ weight, summed in float32 and rounded once; see `matmul`."""
    return _product(dy_TN, weight_NK, weight_NK.shape[1], out_dtype, back=True)


def add_outer(
    total_NK: Tensor, peak: Tensor, scale: float, dy_TN: Tensor, x_TK: Tensor, block: int, tile: tuple[int, int]
) -> None:
    """Add each block's dy.T @ x, rounded to multiples of 1 / scale, to integers; update the largest magnitude."""
    dy_TN, x_TK = _aligned(dy_TN), _aligned(x_TK)
    sizes, (rows, columns), blocks = _outer_tile(dy_TN.device), total_NK.shape, len(dy_TN) // block
    depth = min(sizes.depth, block & -block)
    tiles = triton.cdiv(rows, sizes.rows) * triton.cdiv(columns, sizes.columns)
    parts = max(1, min(blocks, _processors(dy_TN.device) * 2 // tiles))
    with _on(dy_TN):
        triton_gemms.add_outer_products[(tiles * parts,)](
            TensorDescriptor.from_tensor(dy_TN, [depth, sizes.rows]),
            TensorDescriptor.from_tensor(x_TK, [depth, sizes.columns]),
            total_NK,
            peak.view(torch.int32),
            rows,
            columns,
            blocks,
            parts,
            total_NK.stride(0),
            scale,
            BLOCK=block,
            ROWS=sizes.rows,
            COLUMNS=sizes.columns,
            DEPTH=depth,
            GROUP=sizes.group,
            num_warps=sizes.warps,
            num_stages=sizes.stages,
        )


def add_rows(total_D: Tensor, peak: Tensor, scale: float, rows_TD: Tensor, index_T: Tensor | None = None) -> None:
    """Add each row, rounded, to one row of integers, or to the row that the index gives; see `plain.add_rows`.

    The integers are contiguous.
    """
    rows, width = rows_TD.shape
    if rows_TD.stride(1) != 1:
        rows_TD = rows_TD.contiguous()
    bits = peak.view(torch.int32)
    with _on(rows_TD):
        if index_T is not None:
            triton_rows.add_at[(rows,)](
                rows_TD,
                index_T,
                total_D,
                bits,
                width,
                rows_TD.stride(0),
                scale,
                WIDTH=min(1024, triton.next_power_of_2(width)),
                num_warps=4,
            )
            return
        programs = max(1, min(64, rows // 64))
        triton_rows.add_columns[(triton.cdiv(width, 128), programs)](
            rows_TD, total_D, bits, rows, width, rows_TD.stride(0), scale, ROWS=16, WIDTH=128, num_warps=4
        )


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute weight * x / rms(x) per row, and 1 / rms(x). Shapes: [T, D] -> [T, D], [T]."""
    x_TD = x_TD.contiguous()
    rows, width = x_TD.shape
    y_TD, rstd_T = torch.empty_like(x_TD), x_TD.new_empty(rows, dtype=torch.float32)
    tall, wide, warps = _rows_at_once(width)
    with _on(x_TD):
        triton_rows.normalise[(triton.cdiv(rows, tall),)](
            x_TD, weight_D, y_TD, rstd_T, rows, width, eps, ROWS=tall, WIDTH=wide, num_warps=warps
        )
    return y_TD, rstd_T


def norm_back(
    dy_TD: Tensor, x_TD: Tensor, rstd_T: Tensor, weight_D: Tensor, total_D: Tensor, peak: Tensor, scale: float
) -> Tensor:
    """Gradient of x; each token's part of the weight's gradient is added to integers."""
    dy_TD, x_TD = dy_TD.contiguous(), x_TD.contiguous()
    rows, width = x_TD.shape
    dx_TD = torch.empty_like(x_TD)
    tall, wide, warps = _rows_at_once(width)
    programs = min(triton.cdiv(rows, tall), 2 * _processors(x_TD.device))
    with _on(x_TD):
        triton_rows.normalise_back[(programs,)](
            dy_TD,
            x_TD,
            rstd_T,
            weight_D,
            dx_TD,
            total_D,
            peak.view(torch.int32),
            rows,
            width,
            scale,
            ROWS=tall,
            WIDTH=wide,
            num_warps=warps,
        )
    return dx_TD


def attend(query_tHd: Tensor, *more: Any) -> tuple[Tensor, Any]:
    """Attention of each block of queries over its own range of keys; see `plain.attend`."""
    return _attention(query_tHd).attend(query_tHd, *more)


def attend_back(d_out_tHd: Tensor, query_tHd: Tensor, *more: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients of the queries, and for each block those of its keys and values; see `plain.attend_back`."""
    return _attention(query_tHd).attend_back(d_out_tHd, query_tHd, *more)


def raise_head_peaks(peak_H: Tensor, values_kHd: Tensor) -> None:
    """Update each head's peak with the largest magnitude of its values; NaN counts as infinite."""
    values_kHd = values_kHd.contiguous()
    rows, heads, width = values_kHd.shape
    wide = triton.next_power_of_2(width)
    with _on(values_kHd):
        triton_rows.find_head_peaks[(min(64, triton.cdiv(rows, 32)), heads)](
            values_kHd,
            peak_H.view(torch.int32),
            rows,
            heads,
            ROWS=max(1, 2048 // wide),
            WIDTH=wide,
            width=width,
            num_warps=4,
        )


def add_scaled(total_kHd: Tensor, scale_H: Tensor, values_kHd: Tensor) -> None:
    """Add values, rounded to multiples of 1 / scale of their head, to integers, which may be strided."""
    values_kHd = values_kHd.contiguous()
    _, heads, width = values_kHd.shape
    with _on(values_kHd):
        triton_rows.add_by_head[(triton.cdiv(values_kHd.numel(), 2048),)](
            values_kHd,
            total_kHd,
            scale_H,
            values_kHd.numel(),
            heads,
            total_kHd.stride(0),
            width=width,
            SIZE=2048,
            num_warps=8,
        )


def to_gradient(total: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Multiply integers by a power of two, rounding through float32, in one pass; see `plain.to_gradient`."""
    total = total.contiguous()
    gradient = torch.empty(total.shape, dtype=dtype, device=total.device)
    if total.numel():
        with _on(total):
            triton_rows.write_gradient[(triton.cdiv(total.numel(), 2048),)](
                total, gradient, factor, total.numel(), SIZE=2048, num_warps=8
            )
    return gradient


def largest(values: Tensor) -> Tensor:
    """Largest magnitude, float32; NaN counts as infinite; 0 if empty."""
    peak = torch.zeros((), device=values.device)
    _over_all(triton_rows.find_peak, values, peak.view(torch.int32))
    return peak


def sum_of_squares(values: Tensor, scale: Tensor) -> Tensor:
    """Sum of all squares, each rounded to a multiple of 1 / scale, as an integer; see `plain.sum_of_squares`."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    _over_all(triton_rows.add_squares, values, total, scale)
    return total


def _over_all(kernel: Any, values: Tensor, *arguments: Tensor) -> None:
    """Launch a kernel whose programs share all elements."""
    values = values.contiguous()
    programs = min(triton.cdiv(values.numel(), 4096), 8 * _processors(values.device))
    if programs:
        with _on(values):
            kernel[(programs,)](values, *arguments, values.numel(), SIZE=4096, num_warps=8)


def piece_statistics(logits_bv: Tensor, local_b: Tensor, divisor_b: Tensor) -> Tensor:
    """Statistics of each row over a piece of the vocabulary, in one pass; see `plain.piece_statistics`."""
    _, highest_b, sum_b, weighted_b, squares_b = TritonPasses().forward(
        logits_bv, local_b, divisor_b, frozenset({"mean_squared_logit"})
    )
    here_b = (local_b >= 0) & (local_b < logits_bv.shape[1])
    target_b = logits_bv.gather(1, local_b.where(here_b, 0)[:, None])[:, 0] / divisor_b
    return torch.stack([highest_b, sum_b, weighted_b, squares_b, target_b.where(here_b, -torch.inf)])


def piece_gradient(
    logits_bv: Tensor,
    local_b: Tensor,
    divisor_b: Tensor,
    logsumexp_b: Tensor,
    entropy_b: Tensor,
    gradients_4b: Tensor,
    out_bv: Tensor,
) -> None:
    """Gradient of the dot products with a piece of the vocabulary, in one pass; see `plain.piece_gradient`."""
    logprob_b, entropy_gradient_b, normaliser_b, square_b = gradients_4b
    TritonPasses().backward(
        logits_bv,
        out_bv,
        local_b,
        divisor_b,
        torch.stack(
            [
                normaliser_b - logprob_b,
                entropy_gradient_b,
                2 * square_b,
                logprob_b,
                logsumexp_b,
                torch.zeros_like(logsumexp_b),
                entropy_b,
            ]
        ),
    )


def _attention(query_tHd: Tensor) -> ModuleType:
    return plain if flash.refusal(query_tHd.dtype, query_tHd.device, query_tHd.shape[2]) else flash


def _product(x_TK: Tensor, weight_NK: Tensor, columns: int, out_dtype: torch.dtype | None, *, back: bool) -> Tensor:
    x_TK, weight_NK = _aligned(x_TK), _aligned(weight_NK)
    rows, depth = x_TK.shape
    out = _room(x_TK, columns, out_dtype or x_TK.dtype)
    tile = _product_tile(out.dtype, x_TK.device)
    across = [tile.depth, tile.columns] if back else [tile.columns, tile.depth]
    programs = tile.at_once * _processors(x_TK.device)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    with _on(x_TK):
        triton_gemms.multiply[(min(programs, tiles),)](
            TensorDescriptor.from_tensor(x_TK, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight_NK, across),
            TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2]),
            rows,
            columns,
            depth,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GROUP=tile.group,
            PROGRAMS=programs,
            BACK=back,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def _product_tile(out_dtype: torch.dtype, device: torch.device) -> _Tile:
    if device.type != "cuda":
        return _Tile(32, 32, 16, group=2, warps=4, stages=1)
    return _Tile(128, 256, 64, group=8, warps=8, stages=4 if out_dtype.itemsize == 2 else 3)


def _outer_tile(device: torch.device) -> _Tile:
    if device.type != "cuda":
        return _Tile(32, 32, 32, group=2, warps=4, stages=1)
    return _Tile(128, 128, 64, group=8, warps=8, stages=4)


def _rows_at_once(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps; they depend on the width of a row alone."""
    wide = triton.next_power_of_2(width)
    return max(1, 2048 // wide), wide, 8 if wide > 2048 else 4


def _aligned(matrix: Tensor) -> Tensor:
    """Return the matrix, copied unless the tensor memory accelerator can read it in place."""
    if matrix.stride(1) == 1 and matrix.stride(0) % _LINE == 0 and matrix.data_ptr() % 16 == 0:
        return matrix
    return _room(matrix, matrix.shape[1], matrix.dtype).copy_(matrix)


def _room(like: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Allocate as many rows of this many columns, aligned for the tensor memory accelerator."""
    return like.new_empty(len(like), -(-columns // _LINE) * _LINE, dtype=dtype)[:, :columns]


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
