"""Which tile a product with the head is cut into, by its depth and dtype and by the device.

Letters: D model dimension | C rows of a chunk | V vocabulary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """How `kernels.exp_product` cuts its work. What a row says depends on it, through the order of sums.

    Attributes:
        rows: of hidden states.
        columns: of the vocabulary.
        depth: of the model dimension, at a time.
        warps: of a program.
        stages: of the pipeline that loads operands.
        group: tiles of rows that share a tile of the head before the next.
        per_processor: programs that run at once on a multiprocessor.
        precision: of products of float32. bf16x6: each operand in three bfloat16, and the six of their nine products
            that float32 can hold; ieee: one float32 product after the other.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int
    per_processor: int = 1
    precision: str = "ieee"


def choose_tile(depth: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile for operands of this depth and dtype on this device, whatever the number of rows.

    Where a product is shallow, two programs on a multiprocessor take turns: one multiplies while the other takes
    exponentials. Measured on an H200 with 151936 columns: 2 to 3 % of all three products at depth 1024, nothing at
    2048, -1 to -2 % at 4096.
    """
    if device.type != "cuda":
        return Tile(32, 32, 32, warps=4, stages=1, group=2)
    if dtype == torch.float32:
        return Tile(128, 128, 32, warps=8, stages=3, group=8, precision="bf16x6")
    if shared_memory(device) < 225 * 1024:
        return Tile(128, 128, 32, warps=8, stages=3, group=8)
    if depth <= 2048:
        return Tile(128, 128, 64, warps=4, stages=3, group=16, per_processor=2)
    return Tile(128, 256, 64, warps=8, stages=4, group=12)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; a few where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may ask for."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
