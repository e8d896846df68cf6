"""Kernels of the canonical pieces of a network, chosen by device and dtype; each is a module with the same functions.

Two kernels differ only in the bits of their results; a record names the one that was used.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch

from workbench.reproducible.kernels import plain


def choose(device: torch.device, dtype: torch.dtype, block_tokens: int) -> ModuleType:
    """Return the fastest kernels for blocks of this many tokens of a dtype on a device."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return plain
    from workbench.reproducible.kernels import triton_16bit

    return plain if triton_16bit.refusal(dtype, device, block_tokens) else triton_16bit
