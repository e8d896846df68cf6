"""Collectives, each with its adjoint stated.

A forward all-reduce has two possible adjoints, and which is right depends on who consumes the result. They are
two functions with two names here; taking the wrong one scales gradients by the size of the axis and changes no
loss. Every rank of an axis calls the same ones in the same order, also a rank that has nothing to add.
On an axis of size 1 each is the identity. What is called is noted in `workbench.sharding.flight`, where others can
see which collective a rank is in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight, wire
from workbench.sharding.mesh import Axis


def sum_identity(partial: Tensor, axis: Axis) -> Tensor:
    """Complete a partial sum whose result every rank then uses for the *same* computation.

    Backward: identity. Right when the gradient that arrives is already the same on all ranks (Megatron's g:
              the output of a row-parallel layer), or when each rank's loss is its own share and the shares
              are summed afterwards.
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (g).
    """
    return partial if axis.group is None else _SumIdentity.apply(partial, axis)


def sum_sum(partial: Tensor, axis: Axis) -> Tensor:
    """Complete a partial sum whose result every rank then uses for a *different* computation.

    Backward: all-reduce sum: what each rank's part of the loss wants from the sum is added up.
    """
    return partial if axis.group is None else _SumSum.apply(partial, axis)


def identity_sum(value: Tensor, axis: Axis) -> Tensor:
    """Hand a replicated value to computations that differ by rank.

    Backward: all-reduce sum of what the ranks' computations want from it (Megatron's f: the input of a
              column-parallel layer, and the hidden states that a vocabulary-parallel head reads).
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (f).
    """
    return value if axis.group is None else _IdentitySum.apply(value, axis)


def gather_scatter(local: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate equal shards along a dimension, in rank order; each rank uses the whole differently.

    Shapes:   [..., t, ...] -> [..., t * size, ...] along ``dim``.
    Backward: reduce-scatter sum: every rank's gradient of a shard is added up and returned to its owner.
              Keys and values of context-parallel attention need exactly this: a slice without the sum would
              lose what the other ranks' queries want from this rank's keys.
    """
    return local if axis.group is None else _GatherScatter.apply(local, axis, dim)


def all_sum(value: Tensor, axis: Axis) -> Tensor:
    """Sum over an axis, outside autograd. Returns a new tensor."""
    return _reduced("all_sum", value, axis)


def all_max(value: Tensor, axis: Axis) -> Tensor:
    """Maximum over an axis, outside autograd. Returns a new tensor."""
    return _reduced("all_max", value, axis, largest=True)


def all_gather(value: Tensor, axis: Axis) -> list[Tensor]:
    """Everyone's tensor, in rank order, outside autograd. Shapes may differ along the first dimension."""
    if axis.group is None:
        return [value.detach().clone()]
    length = torch.tensor([value.shape[0]], device=value.device)
    with _in("all_gather of lengths", length, axis):
        lengths = wire.all_gather(length, axis.group, axis.size)
    longest = max(int(n) for n in lengths)
    padded = value.new_zeros((longest, *value.shape[1:]))
    padded[: value.shape[0]] = value.detach()
    # bool has no wire type in every backend; bytes do.
    sent = padded.to(torch.uint8) if value.dtype == torch.bool else padded
    with _in("all_gather", sent, axis):
        pieces = wire.all_gather(sent, axis.group, axis.size)
    return [piece[: int(n)].to(value.dtype) for piece, n in zip(pieces, lengths, strict=True)]


def _in(name: str, tensor: Tensor, axis: Axis, caller: str | None = None) -> AbstractContextManager[None]:
    """The time that this rank spends in a collective, noted for whoever asks where it is."""
    group = wire.group_name(axis.group)
    return flight.entering(name, axis.name, axis.ranks, group, tensor.shape, tensor.dtype, caller=caller)


def _reduced(name: str, value: Tensor, axis: Axis, *, largest: bool = False) -> Tensor:
    out = value.detach().clone().contiguous()
    if axis.group is not None:
        with _in(name, out, axis):
            wire.all_reduce(out, axis.group, largest=largest)
    return out


class _SumIdentity(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis) -> Tensor:
        out = partial.clone(memory_format=torch.contiguous_format)
        with _in("sum_identity", out, axis):
            wire.all_reduce(out, axis.group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumSum(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.caller = axis, flight.caller()
        out = partial.clone(memory_format=torch.contiguous_format)
        with _in("sum_sum", out, axis, ctx.caller):
            wire.all_reduce(out, axis.group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = gradient.clone(memory_format=torch.contiguous_format)
        with _in("backward of sum_sum", out, ctx.axis, ctx.caller):
            wire.all_reduce(out, ctx.axis.group)
        return out, None


class _IdentitySum(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.caller = axis, flight.caller()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = gradient.clone(memory_format=torch.contiguous_format)
        with _in("backward of identity_sum", out, ctx.axis, ctx.caller):
            wire.all_reduce(out, ctx.axis.group)
        return out, None


class _GatherScatter(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.caller = axis, dim, flight.caller()
        local = local.contiguous()
        with _in("gather_scatter", local, axis, ctx.caller):
            pieces = wire.all_gather(local, axis.group, axis.size)
        return torch.cat(pieces, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axis = ctx.axis
        stacked = torch.stack(gradient.chunk(axis.size, dim=ctx.dim)).contiguous()  # the first dimension is the owner
        with _in("backward of gather_scatter", stacked, axis, ctx.caller):
            own = wire.reduce_scatter(stacked, axis.group, axis.rank)
        return own, None, None
