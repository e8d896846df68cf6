"""Values of a step that follow from what a trainer recorded: ratios from logs, clip decisions from losses of tokens.

Letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LEAST = 1e-5
"""Relative distance of a float32 loss from ratio * advantage that is no rounding: 80 ulp, a convention."""


def ratios_of(logs_T: Tensor, *, bound: float) -> Tensor:
    """Return [T] ratios exp(log), the log within +-bound."""
    return logs_T.double().clamp(-bound, bound).exp()


def clipped_of(losses_T: Tensor, ratios_T: Tensor, advantages_T: Tensor) -> Tensor:
    """Return [T] bool: where a token's loss is not -ratio * advantage, so that a clip replaced it."""
    unclipped_T = -ratios_T.double() * advantages_T.double()
    return (losses_T.double() - unclipped_T).abs() > LEAST * unclipped_T.abs()


def same_content(one: Any, other: Any) -> bool:
    """Return True if two containers of tensors, numbers and text are equal, bit by bit."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_content(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_content, one, other))
    return type(one) is type(other) and bool(one == other)
