"""Float64 throughout a user's function, also where it casts to narrower floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
FACTORIES = (torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.as_tensor, torch.linspace, torch.eye)
"""Functions that create float32 tensors if no dtype is given."""


class InFloat64(TorchFunctionMode):
    """Mode in which a cast to a narrower float gives float64, and so does a new tensor of one.

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
        """Call the function, with float64 in place of each narrower dtype."""
        if func in CASTS:
            return args[0].double()
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        result = func(*map(_wide, args), **named)
        if func in FACTORIES and "dtype" not in named and result.dtype in NARROW:
            return func(*args, **named, dtype=torch.float64)
        return result


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
