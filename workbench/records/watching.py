"""Functions of torch that a recorder watches: clipping, and backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from workbench.sharding.data_parallel import is_shard
from workbench.sharding.gradients import local_gradient

CLIPPING = (
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grads_with_norm_"),
    (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
)
"""Functions by which trainers reach torch's clipping: accelerate, transformers and Lightning the first; torchtitan
the second, with a norm of its own; verl the third, as the first itself does. A name that torch lacks is left out."""


def watch_clipping(
    parameters: Mapping[str, nn.Parameter], seen: Callable[[float, dict[str, nn.Parameter]], None]
) -> Callable[[], None]:
    """Call a function with bound and parameters whenever torch is about to clip some of these; return a stop function.

    The functions of `CLIPPING` are wrapped. One of them may call another, and the function is called for each; a loop
    that imported the second or the third earlier is not seen.
    """
    names = {id(value): name for name, value in parameters.items()}

    def see(given: Any, max_norm: float) -> Any:
        given = [given] if isinstance(given, Tensor) else list(given)
        if clipped := {names[id(value)]: value for value in given if id(value) in names}:
            seen(max_norm, clipped)
        return given

    stops = [_watch_call(module, name, see) for module, name in CLIPPING if hasattr(module, name)]

    def stop() -> None:
        for each in stops:
            each()

    return stop


def _watch_call(module: Any, name: str, see: Callable[[Any, float], Any]) -> Callable[[], None]:
    """Call a function with the parameters and the bound of every call of a clipping; return a stop function."""
    correct: Any = getattr(module, name)

    @functools.wraps(correct)
    def clip(given: Any, max_norm: float, *more: Any, **options: Any) -> Any:
        return correct(see(given, max_norm) if wrapper.watches else given, max_norm, *more, **options)

    wrapper: Any = clip
    return _installed(module, name, wrapper)


def watch_losses(seen: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call a function with every number that is back-propagated, after its backward; return a stop function.

    ``torch.autograd.backward`` is wrapped, which ``Tensor.backward`` and so trainers call. A backward from given
    gradients, as between stages of a pipeline, begins at no loss.
    """
    module = torch.autograd
    correct: Any = module.backward

    @functools.wraps(correct)
    def backward(tensors: Any, grad_tensors: Any = None, *more: Any, **options: Any) -> Any:
        result = correct(tensors, grad_tensors, *more, **options)
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if wrapper.watches and grad_tensors is None and len(roots) == 1 and roots[0].numel() == 1:
            seen(roots[0].detach())
        return result

    wrapper: Any = backward
    return _installed(module, "backward", wrapper)


def _installed(module: Any, name: str, wrapper: Any) -> Callable[[], None]:
    """Put a wrapper in place of a function; return the function that stops it."""
    wrapper.watches = True
    setattr(module, name, wrapper)

    def stop() -> None:
        wrapper.watches = False
        while getattr(getattr(module, name), "watches", True) is False:  # another one may lie above this one
            setattr(module, name, cast(Any, getattr(module, name)).__wrapped__)

    return stop


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method as long as its object lives, and does not keep it alive."""
    of_object = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        if (alive := of_object()) is not None:
            alive(*given)

    return call


def when_backward_begins(parameters: Mapping[str, nn.Parameter], see: Callable[[Tensor | None], None]) -> list[Any]:
    """Hooks that pass on a parameter's gradient before a backward adds to it, of the first that is no shard."""
    first = next((value for value in parameters.values() if not is_shard(value) and value.requires_grad), None)
    return [] if first is None else [first.register_hook(lambda _: see(local_gradient(first)))]
