"""Gradients of a model that somebody else made and sharded, measured whole.

A parameter may be a plain tensor, whose gradient every rank is taken to hold whole (one rank, DDP), or a DTensor
(FSDP2, tensor parallelism by DTensor), whose placements say where its elements lie. Each element is counted once: a
sum goes over the mesh dimensions that a gradient is cut over, never over those that repeat it. A gradient that is still
a partial sum is completed first, for the norm of a part says nothing.

A gradient is ``parameter.grad``, or, where that is None, ``parameter.main_grad``: Megatron's DDP adds every gradient to
that buffer as soon as it is there, and takes ``grad`` away.

Every rank calls these with the same parameters.

Source: DTensor's placements as in torch 2.11 to 2.13. Why ``get_total_norm`` does not serve: pytorch/pytorch#180346
        (plain tensors beside DTensors, two meshes) and #170862 (its result is a partial norm).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.sharding.collectives import all_sum
from workbench.sharding.data_parallel import is_shard
from workbench.sharding.given_groups import axis_of

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What torch.compile and activation checkpointing put into names."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that take a gradient, by the names that they have in the model itself.

    What DDP puts before all names, and torch.compile and activation checkpointing into some, is left out. Tied weights
    are one parameter.

    Example:
        >>> list(trained_parameters(nn.ModuleDict({"_orig_mod": nn.Linear(2, 2, bias=False)})))
        ['weight']
    """
    named = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    while named and all(name.startswith("module.") for name in named):
        named = {name.removeprefix("module."): parameter for name, parameter in named.items()}
    return named


def held_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The gradient that a parameter holds; None where there is none.

    ``grad`` comes first: where both are there, the buffer is not in use, or this gradient is not in it yet.
    """
    if parameter.grad is not None:
        return parameter.grad
    buffer = getattr(parameter, "main_grad", None)
    return buffer if isinstance(buffer, Tensor) and buffer.shape == parameter.shape else None


def in_buffers(parameters: Mapping[str, nn.Parameter]) -> bool:
    """True if no parameter has a ``grad``, and some have a ``main_grad``."""
    held = [parameter for parameter in parameters.values() if held_gradient(parameter) is not None]
    return bool(held) and all(parameter.grad is None for parameter in held)


@torch.no_grad()
def given_norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """L2 norm of every parameter's whole gradient; 0 where there is none. Collective over what they are cut over.

    One collective for all parameters that are cut over the same dimensions of the same mesh, and each dimension.

    Units: squares are added up in float64.
    """
    buckets: dict[tuple[DeviceMesh, tuple[int, ...]] | None, dict[str, Tensor]] = defaultdict(dict)
    for name, parameter in parameters.items():
        gradient = _settled(parameter)
        held = gradient.to_local() if is_shard(gradient) else gradient
        buckets[_cut_over(gradient)][name] = _sum_of_squares(held)
    found = {}
    for place, squares in buckets.items():
        total = torch.stack(list(squares.values()))
        if place is not None:
            mesh, dims = place
            total = total.to(mesh.device_type)
            for dim in dims:
                total = all_sum(total, axis_of(mesh.get_group(dim), _name(mesh, dim)))
        found |= dict(zip(squares, total.sqrt().tolist(), strict=True))
    return {name: found[name] for name in parameters}


@torch.no_grad()
def given_gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's whole gradient on every rank; zeros where there is none. Collective over what it is cut over.

    Where it is not cut, it shares memory with what the parameter holds.
    """
    return whole_value(_settled(parameter))


@torch.no_grad()
def whole_value(value: Any) -> Tensor:
    """A tensor as it is; a DTensor whole, on every rank. Collective over what it is cut over or partial."""
    return (value.full_tensor() if is_shard(value) else value).detach()


def _settled(parameter: nn.Parameter) -> Any:
    """The gradient of a parameter, no partial sum any more; zeros for none."""
    held: Any = held_gradient(parameter)
    gradient = torch.zeros_like(parameter) if held is None else held
    if is_shard(gradient) and any(placement.is_partial() for placement in gradient.placements):
        from torch.distributed.tensor import Replicate

        return gradient.redistribute(
            placements=[Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        )
    return gradient


def _cut_over(gradient: Any) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh and those of its dimensions that a gradient is cut over; None where every rank holds it whole."""
    if not is_shard(gradient):
        return None
    dims = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, dims) if dims else None


def _name(mesh: DeviceMesh, dim: int) -> str:
    return mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else f"dimension {dim}"


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """In float64, of which only a piece exists at a time."""
    return torch.stack([piece.double().square().sum() for piece in gradient.reshape(-1).split(2**24)]).sum()
