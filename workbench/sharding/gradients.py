"""Gradients after backward: complete every partial sum once, then measure without counting twice.

Each rank back-propagated the plain sum over its own tokens, so the gradient of the step is the *sum* over
dp x cp; nothing is averaged. Parameters that every tp rank holds whole but trains with local heads only take one
more sum over tp, once per optimizer step.

Where parameters are sharded over dp x cp (`workbench.sharding.data_parallel`), backward has summed over dp x cp
already, and a rank has its part of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.sharding.collectives import all_gather, all_sum, all_sum_
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard, full_gradient


@torch.no_grad()
def sum_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> None:
    """Complete every gradient in place: sum over dp x cp, and over tp where only a part is local.

    A parameter without a gradient on this rank (a row without documents) takes part with zeros. Call once per
    optimizer step, after all micro-batches. Gradients share buckets: a collective for many.
    """
    whole, partial = [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = _here(parameter.grad, shards[name])
        if not shards[name].over_dp_cp:
            whole.append(gradient)
        if shards[name].gradient_is_partial:
            partial.append(gradient)
    all_sum_(whole, mesh["dp_cp"])
    all_sum_(partial, mesh["tp"])


def gradient_norms(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, float]:
    """L2 norm of every parameter's whole gradient, each element counted once.

    One collective over tp, and one over dp x cp where parameters are sharded over it (then all are).

    Units:  squares are added up in float64; the global norm is the root of the sum of theirs.
    """
    squares = []
    for name, parameter in model.named_parameters():
        square = _sum_of_squares(_here(parameter.grad, shards[name]))
        replicated = shards[name].dim is None
        squares.append(torch.zeros_like(square) if replicated and mesh["tp"].rank else square)
    total = all_sum(torch.stack(squares), mesh["tp"])
    if any(shard.over_dp_cp for shard in shards.values()):
        total = all_sum(total, mesh["dp_cp"])
    return dict(zip((name for name, _ in model.named_parameters()), total.sqrt().tolist(), strict=True))


@torch.no_grad()
def scale_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], factor: float) -> None:
    """Multiply every gradient, in place, with a factor that is the same on every rank."""
    for name, parameter in model.named_parameters():
        _here(parameter.grad, shards[name]).mul_(factor)


def full_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Every parameter's whole gradient, on every rank. Collective over tp, and dp x cp where parameters are sharded."""
    return {name: _whole(parameter.grad, shards[name], mesh) for name, parameter in model.named_parameters()}


def full_weights(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Every parameter, whole, on every rank. Collective over tp, and dp x cp where parameters are sharded."""
    return {name: _whole(parameter, shards[name], mesh) for name, parameter in model.named_parameters()}


def _here(value: Any, shard: ParameterShard) -> Tensor:
    """What this rank holds of a parameter or its gradient; shares memory."""
    return (value.detach().to_local() if shard.over_dp_cp else value).detach()


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """In float64, of which only a piece exists at a time."""
    return torch.stack([piece.double().square().sum() for piece in gradient.reshape(-1).split(2**24)]).sum()


def _whole(value: Tensor, shard: ParameterShard, mesh: Mesh) -> Tensor:
    held = _here(value, shard)
    return full_gradient(torch.cat(all_gather(held, mesh["dp_cp"])) if shard.over_dp_cp else held, shard, mesh["tp"])
