"""Copies of a model's weights in the dtype of its computation: the mixed precision of one rank, and of plain tp.

The parameters of the model are the weights that the optimizer updates. During a step, its modules hold copies of them
in another dtype instead, cast once; micro-batches share them. FSDP2 does the same to gathered parameters
(``MixedPrecisionPolicy``), so that sharded and replicated parameters have the same casts: a weight that is used
several times (a tied head) gets the sum of its gradients in the dtype of the computation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def compute_copies(model: nn.Module, dtype: torch.dtype, *, accumulate: bool) -> Iterator[None]:
    """Put copies of a model's parameters in their place, for a forward and the backward that follows.

    With ``accumulate`` the gradients of several backward passes are added in the dtype of the copies, and reach the
    parameters at the end; otherwise each is cast and added to the parameter's. Parameters of this dtype, and frozen
    ones, have no gradient of another dtype and are handled the same. Buffers stay.

    Names and the order of parameters do not change. Shared parameters share a copy.
    """
    copies: dict[nn.Parameter, Tensor] = {}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.dtype != dtype
    ]
    for _, _, parameter in places:
        if parameter not in copies:
            copy = (parameter.detach() if accumulate else parameter).to(dtype)
            copies[parameter] = copy.requires_grad_(parameter.requires_grad) if accumulate else copy
    try:
        for module, name, parameter in places:
            module._parameters[name] = copies[parameter]  # type: ignore[assignment]  # as FSDP2 does
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
    for parameter, copy in copies.items() if accumulate else ():
        if copy.grad is not None:
            added = copy.grad.to(parameter.dtype)
            parameter.grad = added if parameter.grad is None else parameter.grad + added
            copy.grad = None
