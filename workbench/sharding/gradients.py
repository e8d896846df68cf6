"""Gradients after backward: complete every partial sum once, then compute norms without double counting.

Each rank back-propagated the plain sum over its own tokens, so the gradient of the step is the *sum* over
dp x cp; nothing is averaged. Parameters that every tp rank holds whole but trains on local heads only take one
more sum over tp, once per optimizer step.

If parameters are sharded over dp x cp (`workbench.sharding.data_parallel`), backward has already summed over dp x cp,
and a rank holds its shard of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.sharding.collectives import all_gather, all_sum, all_sum_
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard, full_gradient, local_part


@torch.no_grad()
def sum_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> None:
    """Complete every gradient in place: sum over dp x cp, and over tp where the local gradient is partial.

    A parameter without a gradient on this rank (a row without documents) contributes zeros. Call once per optimizer
    step, after all micro-batches. Gradients are bucketed: one collective for many.
    """
    whole, partial = [], []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = _local(parameter.grad, shards[name])
        if not shards[name].over_dp_cp:
            whole.append(gradient)
        if shards[name].gradient_is_partial:
            partial.append(gradient)
    all_sum_(whole, mesh["dp_cp"])
    all_sum_(partial, mesh["tp"])


def gradient_norms(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, float]:
    """L2 norm of every parameter's global gradient, each element counted once.

    One collective over tp, and one over dp x cp if parameters are sharded over it (then all are).

    Units:  squares are summed in float64; the global norm is the root of the sum of the squared norms.
    """
    squares = []
    for name, parameter in model.named_parameters():
        square = _sum_of_squares(_local(parameter.grad, shards[name]))
        replicated = shards[name].dim is None
        squares.append(torch.zeros_like(square) if replicated and mesh["tp"].rank else square)
    total = all_sum(torch.stack(squares), mesh["tp"])
    if any(shard.over_dp_cp for shard in shards.values()):
        total = all_sum(total, mesh["dp_cp"])
    return dict(zip((name for name, _ in model.named_parameters()), total.sqrt().tolist(), strict=True))


@torch.no_grad()
def scale_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], factor: float) -> None:
    """Multiply every gradient, in place, by a factor that is the same on every rank."""
    for name, parameter in model.named_parameters():
        _local(parameter.grad, shards[name]).mul_(factor)


def full_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Gather every parameter's gradient on every rank. Collective over tp, and dp x cp if parameters are sharded."""
    return {name: full_tensor(parameter.grad, shards[name], mesh) for name, parameter in model.named_parameters()}


def full_weights(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Gather every parameter on every rank. Collective over tp, and dp x cp if parameters are sharded."""
    return {name: full_tensor(parameter, shards[name], mesh) for name, parameter in model.named_parameters()}


def _local(value: Any, shard: ParameterShard) -> Tensor:
    """This rank's shard of a parameter or its gradient; shares memory."""
    return (value.detach().to_local() if shard.over_dp_cp else value).detach()


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """Sum in float64, converted piece by piece to bound memory."""
    return torch.stack([piece.double().square().sum() for piece in gradient.reshape(-1).split(2**24)]).sum()


def full_tensor(value: Tensor, shard: ParameterShard, mesh: Mesh) -> Tensor:
    """Gather a parameter, its gradient or its optimizer state on every rank; collective as `full_weights`."""
    local = _local(value, shard)
    return full_gradient(torch.cat(all_gather(local, mesh["dp_cp"])) if shard.over_dp_cp else local, shard, mesh["tp"])


@torch.no_grad()
def copy_local_part(value: Tensor, whole: Tensor, shard: ParameterShard, mesh: Mesh) -> None:
    """Copy this rank's shard of a whole tensor, in place: the inverse of `whole_tensor`. Not collective."""
    part = local_part(whole, shard, mesh["tp"])
    local = _local(value, shard)
    if shard.over_dp_cp:
        pieces = part.chunk(mesh["dp_cp"].size)
        part = pieces[mesh["dp_cp"].rank] if mesh["dp_cp"].rank < len(pieces) else part[:0]
    local.copy_(part)
