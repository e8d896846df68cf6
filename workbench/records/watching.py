"""Functions of torch that a recorder watches: clipping, and backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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

    def see(given: list[Any], max_norm: float) -> None:
        if clipped := {names[id(value)]: value for value in given if id(value) in names}:
            seen(max_norm, clipped)

    stops = [_watched(module, name, see, _clipping) for module, name in CLIPPING if hasattr(module, name)]

    def stop() -> None:
        for each in stops:
            each()

    return stop


def _clipping(correct: Any, watchers: list[_Watcher]) -> Any:
    """A clipping that shows parameters and bound of every call first."""

    def clip(given: Any, max_norm: float, *more: Any, **options: Any) -> Any:
        given = [given] if isinstance(given, Tensor) else list(given)
        for watcher in tuple(watchers):
            watcher.see(given, max_norm)
        return correct(given, max_norm, *more, **options)

    return clip


def watch_losses(seen: Callable[[Tensor], None]) -> Callable[[], None]:
    """Call a function with every number that is back-propagated, after its backward; return a stop function.

    ``torch.autograd.backward`` is wrapped, which ``Tensor.backward`` and so trainers call. A backward from given
    gradients, as between stages of a pipeline, begins at no loss.
    """
    return _watched(torch.autograd, "backward", seen, _backward)


def _backward(correct: Any, watchers: list[_Watcher]) -> Any:
    def backward(tensors: Any, grad_tensors: Any = None, *more: Any, **options: Any) -> Any:
        result = correct(tensors, grad_tensors, *more, **options)
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if grad_tensors is None and len(roots) == 1 and roots[0].numel() == 1:
            for watcher in tuple(watchers):
                watcher.see(roots[0].detach())
        return result

    return backward


@dataclass(eq=False)
class _Watcher:
    """One that sees calls of a function, and is removed by identity."""

    see: Callable[..., None]


def _watched(
    module: Any, name: str, see: Callable[..., None], wrap: Callable[[Any, list[_Watcher]], Any]
) -> Callable[[], None]:
    """Let a function be seen; return the function that stops it.

    One wrapper serves all who watch, so that a process with hundreds of recorders nests no calls; with the last one the
    function is put back, unless another's wrapper lies above.
    """
    current = getattr(module, name)
    watchers: list[_Watcher] | None = getattr(current, "watchers", None)  # functools.wraps copies it to those above
    if watchers is None:
        watchers = []
        wrapper: Any = functools.wraps(current)(wrap(current, watchers))
        wrapper.watchers, wrapper.itself = watchers, weakref.ref(wrapper)
        setattr(module, name, wrapper)
    watcher = _Watcher(see)
    watchers.append(watcher)

    def stop() -> None:
        if watcher in watchers:
            watchers.remove(watcher)
        top: Any = getattr(module, name)
        if not watchers and getattr(top, "watchers", None) is watchers and top.itself() is top:
            setattr(module, name, top.__wrapped__)

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
