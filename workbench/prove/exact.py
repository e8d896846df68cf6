"""Somebody's own function, computed in float64 where it asks for less.

Trainers cast: log-probabilities to float32, masks to whatever multiplies. A proof asks whether the arithmetic is that
of one process, at bars that no rounding of float32 meets. What such a function has computed again in backward
(`torch.utils.checkpoint`) is not reached: there its casts are what they say, and torch refuses the other dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.as_tensor, torch.linspace, torch.eye)
"""What makes float32 of numbers where nobody names a dtype."""


class InFloat64(TorchFunctionMode):
    """While it is entered, a cast to a narrower float gives float64, and so does a new tensor of one.

    Example:
        >>> with InFloat64():
        ...     torch.ones(1).float().dtype, torch.ones(1).to(torch.bfloat16).dtype, torch.ones(1).int().dtype
        (torch.float64, torch.float64, torch.int32)
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what was asked, with float64 for each dtype that is narrower."""
        if func in CASTS:
            return args[0].double()
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        found = func(*map(_wide, args), **named)
        if func in FACTORIES and "dtype" not in named and found.dtype in NARROW:
            return func(*args, **named, dtype=torch.float64)
        return found


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
