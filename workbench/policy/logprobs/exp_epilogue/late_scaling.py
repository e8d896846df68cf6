"""Kernels of `workbench.policy.logprobs.late_scaling`: the factor is read first; scaling by 1 returns at once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
PROGRAMS = 1056  # eight on each of 132 multiprocessors


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
