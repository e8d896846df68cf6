"""Gradients after backward: complete every partial sum once, then measure without counting twice.

Each rank back-propagated the plain sum over its own tokens, so the gradient of the step is the *sum* over
dp x cp; nothing is averaged. Parameters that every tp rank holds whole but trains with local heads only take one
more sum over tp, once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard, full_gradient


def sum_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> None:
    """Complete every gradient in place: sum over dp x cp, and over tp where only a part is local.

    A parameter without a gradient on this rank (a row without documents) takes part with zeros. Call once per
    optimizer step, after all micro-batches.
    """
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = all_sum(gradient, mesh["dp_cp"])
        if shards[name].gradient_is_partial:
            gradient = all_sum(gradient, mesh["tp"])
        parameter.grad = gradient


def gradient_norms(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """L2 norm of every parameter's whole gradient, each element counted once. One collective over tp.

    Units:  float64 scalars; the global norm is the root of the sum of their squares.
    """
    squares = []
    for name, parameter in model.named_parameters():
        square = parameter.grad.detach().double().square().sum()
        replicated = shards[name].dim is None
        squares.append(torch.zeros_like(square) if replicated and mesh["tp"].rank else square)
    total = all_sum(torch.stack(squares), mesh["tp"]).sqrt()
    return dict(zip((name for name, _ in model.named_parameters()), total, strict=True))


def full_gradients(model: nn.Module, shards: Mapping[str, ParameterShard], mesh: Mesh) -> dict[str, Tensor]:
    """Every parameter's whole gradient, on every rank. Collective over tp."""
    return {name: full_gradient(parameter.grad, shards[name], mesh["tp"])
            for name, parameter in model.named_parameters()}
