"""The CPU in the place of a CUDA device, for packages that name the device themselves, as megatron-core does.

    with CudaOnCpu():
        ...                                  # torch.zeros(2, device="cuda") is a tensor of the CPU

No line of the package is changed. What a GPU alone has is not run: kernels, streams, NCCL and overlapping
communication, and CUDA's generators of random numbers (there is no dropout in the drivers).

Source: torch 2.13, `torch.overrides.TorchFunctionMode`, as `torch.device` itself uses it as a context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaOnCpu(TorchFunctionMode):
    """Context in which torch takes the CPU where it is given CUDA, and tensors name CUDA as their type."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        named = {name: _device(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not named:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **named)

    def __enter__(self) -> CudaOnCpu:
        """Begin; ``torch.cuda.current_device()``, a plain function that a mode does not see, gives the CPU, too."""
        self._current_device = torch.cuda.current_device
        torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End."""
        super().__exit__(*error)
        torch.cuda.current_device = self._current_device


def _device(value: Any) -> Any:
    return CPU if value is not None and str(value).startswith("cuda") else value
