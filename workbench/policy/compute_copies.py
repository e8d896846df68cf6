"""Copies of a model's weights in the dtype of its computation: the mixed precision of one rank, and of plain tp.

The parameters of the model are the weights that the optimizer updates. During a step, its modules hold copies of them
in another dtype instead, cast once; micro-batches share them. FSDP2 does the same to gathered parameters
(``MixedPrecisionPolicy``), so that sharded and replicated parameters have the same casts: a weight that is used
several times (a tied head) gets the sum of its gradients in the dtype of the computation. Single kinds of modules may
have a dtype of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.errors import SpecError


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


_KINDS = {"router": ("Router",), "norms": ("Norm",)}
"""Kind of module -> what the names of its classes end with, in `transformers`."""


def use_module_dtypes(model: Any, dtypes: Mapping[str, torch.dtype | None]) -> Any:
    """Compute the modules of some kinds in dtypes of their own, and return the model.

    Such a module gets its input and copies of its weights in that dtype, and its output is cast back, as Megatron-LM's
    ``--moe-router-dtype`` does to routers.

    Args:
        model: of `transformers`, whole or this tp rank's shard.
        dtypes: kind (of "router" and "norms") -> dtype; None leaves these modules as they are.

    Raises:
        SpecError: a model without such modules.
    """
    for kind, dtype in dtypes.items():
        if dtype is None:
            continue
        modules = [module for module in model.modules() if type(module).__name__.endswith(_KINDS[kind])]
        if not modules:
            raise SpecError(
                f"mixed_precision.{kind} = {str(dtype).removeprefix('torch.')!r}",
                found=f"no {kind} in a {model.config.get_text_config().model_type} model",
                rule=f"modules whose class ends with {' or '.join(_KINDS[kind])}",
                fix=f"leave {kind} out for this model",
            )
        for module in modules:
            module.forward = functools.partial(_in_dtype, module, module.forward, dtype)
    return model


def _in_dtype(module: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, hidden: Tensor, *more: Any) -> Any:
    def back(value: Any) -> Any:
        return value.to(hidden.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    with compute_copies(module, dtype, accumulate=False):
        output = forward(hidden.to(dtype), *more)
    return tuple(back(value) for value in output) if isinstance(output, tuple) else back(output)
