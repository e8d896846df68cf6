"""Scale an existing gradient by a factor that is known only later: in one pass, or in none if it is 1.

The factor is on the device, and is not synchronized. It is float32 for every gradient dtype: rounded to bfloat16, a
factor of 1/3 would be off by a thousandth.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from workbench.policy.logprobs import triton_unsupported_reason


def scale_(gradient: Tensor, factor: Tensor) -> Tensor:
    """Compute ``gradient *= factor``; a factor of 1 reads and writes nothing.

    Shapes: any, contiguous; factor of one element. Returns the gradient.
    """
    if _kernels(gradient):
        from workbench.policy.logprobs.exp_epilogue.late_scaling import scale_in_place

        scale_in_place(gradient, factor)
        return gradient
    if gradient.is_cuda or bool(factor != 1):
        gradient.copy_(gradient * factor.reshape(1))
    return gradient


def add_scaled_(into: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """Compute ``into += factor * gradient``, rounded once.

    Shapes: two of any one shape, contiguous; factor of one element. Returns ``into``.
    """
    if _kernels(into):
        from workbench.policy.logprobs.exp_epilogue.late_scaling import add_in_place

        add_in_place(into, gradient, factor)
        return into
    return into.copy_(into + gradient * factor.reshape(1))


def _kernels(value: Tensor) -> bool:
    return value.is_cuda and value.dtype != torch.float64 and value.is_contiguous() and _triton_runs()


@functools.cache
def _triton_runs() -> bool:
    return triton_unsupported_reason(torch.float32, torch.device("cuda")) is None
