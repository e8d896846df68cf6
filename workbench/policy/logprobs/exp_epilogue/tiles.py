"""Tile sizes of a GEMM with the head, by its dtype and the device; blocks and alignment of rows.

Letters: D model dimension | C rows of a chunk | V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Tiling of `kernels.exp_gemm`. A row's bits depend on it, through the order of sums.

    Attributes:
        rows: of hidden states.
        columns: of the vocabulary.
        depth: of the model dimension, at a time.
        warps: of a program.
        stages: of the pipeline that loads operands.
        group: tiles of rows that share a tile of the head before the next.
        precision: of float32 GEMMs. bf16x6: each operand split into three bfloat16, and the six of their nine
            products that float32 can resolve; ieee: plain float32 multiplications.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int
    precision: str = "ieee"


def choose_tile(dtype: torch.dtype, device: torch.device) -> Tile:
    """Choose the tile for operands of this dtype on this device, independent of their number and depth.

    Measured by hand on H200s at their power limit, at depths of 1,024 to 7,360: without a gradient groups of 16 tiles
    take 1 to 4 % less time than groups of 12 or 20, with one the three are within the noise of 1 to 2 %. Smaller tiles,
    two at a time on a multiprocessor, one of which multiplies while the other computes exponentials, take 2 to 5 % more
    at depths of 1,024 and 1,344, and more beyond. Four stages of operands take 0.3 to 1.7 % longer than three (a step,
    at six sizes).
    """
    if device.type != "cuda":
        return Tile(32, 32, 32, warps=4, stages=1, group=2)
    if dtype == torch.float32:  # bf16x6: otherwise at a quarter of cuBLAS's speed (DECISIONS.md, 55)
        return Tile(128, 128, 32, warps=8, stages=3, group=8, precision="bf16x6")
    if shared_memory(device) < 225 * 1024:
        return Tile(128, 128, 32, warps=8, stages=3, group=8)
    return Tile(128, 256, 64, warps=8, stages=3, group=16)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; 3 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may request."""
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stub lacks it


def block_of(depth: int) -> int:
    """Elements of a row of hidden states that a program loads at a time."""
    return min(1024, triton.next_power_of_2(depth))


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix with rows aligned to 16 bytes, as TMA requires; copied only if necessary."""
    size = matrix.element_size()
    fits = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and matrix.stride(0) * size % 16 == 0
    if fits and matrix.data_ptr() % 16 == 0:
        return matrix
    rows, columns = matrix.shape
    per_row = 16 // size
    copy = matrix.new_empty(rows, -(-columns // per_row) * per_row)[:, :columns]
    return copy.copy_(matrix)
