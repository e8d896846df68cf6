"""The two passes over logits as Triton kernels: one program per row, all arithmetic in float32.

Letters: T tokens | V vocabulary (this rank's columns) | K scalars of a row.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

_BITS = tl.constexpr(1.4426950408889634)  # per nat
_NOTHING = tl.constexpr(-1e30)  # stands for a logit of -inf: probability 0, and 0 times it is 0, not NaN


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["targets", "temperatures"])
def read_rows(
    logits,
    targets,
    temperatures,
    out,
    rows,
    columns,
    stride,
    temperature,
    SQUARES: tl.constexpr,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[5, T]: a (0 if the target is not local), m, s, u and q, by an online softmax."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    here = (target >= 0) & (target < columns)
    if PER_ROW:
        temperature = tl.load(temperatures + row)
    per_temperature = 1.0 / temperature
    place = logits + row * stride
    own = tl.load(place + tl.where(here, target, 0), mask=here, other=0.0).to(tl.float32) * per_temperature
    highest = _NOTHING
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    column = tl.arange(0, BLOCK)
    ahead = tl.load(place + column, mask=column < columns, other=-float("inf"))
    for start in range(0, columns, BLOCK):
        z = ahead.to(tl.float32) * per_temperature
        column = start + BLOCK + tl.arange(0, BLOCK)
        ahead = tl.load(place + column, mask=column < columns, other=-float("inf"))
        above = tl.maximum(highest, tl.max(z, 0))
        raised = above - highest
        shrunk = tl.exp2(-raised * _BITS)
        shifted = tl.where(z == -float("inf"), _NOTHING, z - above)
        exponential = tl.exp2(shifted * _BITS)
        weighted = shrunk * (weighted - raised * total) + exponential * shifted
        total = shrunk * total + exponential
        if SQUARES:
            squares += tl.where(z == -float("inf"), 0.0, z * z)
        highest = above
    none = highest == _NOTHING  # every logit is -inf
    tl.store(out + row, tl.where(here, own - highest, 0.0))
    tl.store(out + rows + row, tl.where(none, -float("inf"), highest))
    tl.store(out + 2 * rows + row, tl.where(none, 0.0, tl.sum(total, 0)))
    tl.store(out + 3 * rows + row, tl.where(none, 0.0, tl.sum(weighted, 0)))
    tl.store(out + 4 * rows + row, tl.sum(squares, 0))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["targets", "temperatures"])
def write_rows(
    logits,
    out,
    targets,
    temperatures,
    numbers,
    rows,
    columns,
    stride,
    out_stride,
    temperature,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient of the logits to a tensor that may be the logits; a row without gradient is not read.

    Programs: rows x blocks of columns.
    """
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    slope = tl.load(numbers + row)
    bend = tl.load(numbers + rows + row)
    pull = tl.load(numbers + 2 * rows + row)
    own = tl.load(numbers + 3 * rows + row)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    written = out + row * out_stride + column
    if (slope == 0.0) & (bend == 0.0) & (pull == 0.0) & (own == 0.0):
        tl.store(written, tl.zeros((BLOCK,), out.dtype.element_ty), mask=inside)
    else:
        highest = tl.load(numbers + 4 * rows + row)
        log_sum = tl.load(numbers + 5 * rows + row)
        entropy = tl.load(numbers + 6 * rows + row)
        if PER_ROW:
            temperature = tl.load(temperatures + row)
        per_temperature = 1.0 / temperature
        z = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(tl.float32) * per_temperature
        exists = z != -float("inf")
        log_p = tl.where(exists, (z - highest) - log_sum, _NOTHING)
        p = tl.exp2(log_p * _BITS)
        gradient = p * (slope - bend * (log_p + entropy)) + tl.where(exists, pull * z, 0.0)
        gradient += tl.where(column == tl.load(targets + row), own, 0.0)
        tl.store(written, (gradient * per_temperature).to(out.dtype.element_ty), mask=inside)


class TritonPasses:
    """Both passes as Triton kernels."""

    def forward(self, logits_TV: Tensor, local_T: Tensor, divisor: float | Tensor, outputs: frozenset[str]) -> Tensor:
        """[5, T]: a (0 if another rank has the target), m, s, u and q, of the local columns."""
        rows, columns = logits_TV.shape
        sums_5T = torch.empty(5, rows, dtype=torch.float32, device=logits_TV.device)
        temperatures_T, one = _temperatures(divisor)
        logits_TV = logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
        with torch.cuda.device(logits_TV.device) if logits_TV.is_cuda else nullcontext():
            if rows:
                read_rows[(rows,)](
                    logits_TV,
                    local_T,
                    temperatures_T,
                    sums_5T,
                    rows,
                    columns,
                    logits_TV.stride(0),
                    one,
                    SQUARES="mean_squared_logit" in outputs,
                    PER_ROW=temperatures_T is not None,
                    BLOCK=_block(columns),
                    num_warps=8,
                )
        return sums_5T

    def backward(
        self, logits_TV: Tensor, out_TV: Tensor, local_T: Tensor, divisor: float | Tensor, row_KT: Tensor
    ) -> None:
        """Write the gradient of the logits to a tensor that may be the logits."""
        rows, columns = logits_TV.shape
        temperatures_T, one = _temperatures(divisor)
        if out_TV.stride(1) != 1:
            gradient_TV = torch.empty(rows, columns, dtype=out_TV.dtype, device=out_TV.device)
            self.backward(logits_TV.contiguous(), gradient_TV, local_T, divisor, row_KT)
            out_TV.copy_(gradient_TV)
            return
        with torch.cuda.device(logits_TV.device) if logits_TV.is_cuda else nullcontext():
            if rows and columns:
                programs = rows * triton.cdiv(columns, _block(columns))
                write_rows[(programs,)](
                    logits_TV,
                    out_TV,
                    local_T,
                    temperatures_T,
                    row_KT,
                    rows,
                    columns,
                    logits_TV.stride(0),
                    out_TV.stride(0),
                    one,
                    PER_ROW=temperatures_T is not None,
                    BLOCK=_block(columns),
                    num_warps=8,
                )


def _block(columns: int) -> int:
    return min(2048, triton.next_power_of_2(max(1, columns)))


def _temperatures(divisor: float | Tensor) -> tuple[Tensor | None, float]:
    if isinstance(divisor, Tensor):
        return divisor.to(torch.float32).reshape(-1).contiguous(), 1.0
    return None, divisor
