"""Collectives, each with its adjoint stated.

A forward all-reduce has two possible adjoints, and which is right depends on who consumes the result. They are
two functions with two names here; taking the wrong one scales gradients by the size of the axis and changes no
loss. Every rank of an axis calls the same ones in the same order, also a rank that has nothing to add.
On an axis of size 1 each is the identity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from workbench.sharding.mesh import Axis


def sum_identity(partial: Tensor, axis: Axis) -> Tensor:
    """Complete a partial sum whose result every rank then uses for the *same* computation.

    Backward: identity. Right when the gradient that arrives is already the same on all ranks (Megatron's g:
              the output of a row-parallel layer), or when each rank's loss is its own share and the shares
              are summed afterwards.
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (g).
    """
    return partial if axis.group is None else _SumIdentity.apply(partial, axis.group)


def sum_sum(partial: Tensor, axis: Axis) -> Tensor:
    """Complete a partial sum whose result every rank then uses for a *different* computation.

    Backward: all-reduce sum: what each rank's part of the loss wants from the sum is added up.
    """
    return partial if axis.group is None else _SumSum.apply(partial, axis.group)


def identity_sum(value: Tensor, axis: Axis) -> Tensor:
    """Hand a replicated value to computations that differ by rank.

    Backward: all-reduce sum of what the ranks' computations want from it (Megatron's f: the input of a
              column-parallel layer, and the hidden states that a vocabulary-parallel head reads).
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (f).
    """
    return value if axis.group is None else _IdentitySum.apply(value, axis.group)


def gather_scatter(local: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate equal shards along a dimension, in rank order; each rank uses the whole differently.

    Shapes:   [..., t, ...] -> [..., t * size, ...] along ``dim``.
    Backward: reduce-scatter sum: every rank's gradient of a shard is added up and returned to its owner.
              Keys and values of context-parallel attention need exactly this: a slice without the sum would
              lose what the other ranks' queries want from this rank's keys.
    """
    return local if axis.group is None else _GatherScatter.apply(local, axis.group, axis.size, axis.rank, dim)


def all_sum(value: Tensor, axis: Axis) -> Tensor:
    """Sum over an axis, outside autograd. Returns a new tensor."""
    return _reduced(value, axis, dist.ReduceOp.SUM)


def all_max(value: Tensor, axis: Axis) -> Tensor:
    """Maximum over an axis, outside autograd. Returns a new tensor."""
    return _reduced(value, axis, dist.ReduceOp.MAX)


def all_gather(value: Tensor, axis: Axis) -> list[Tensor]:
    """Everyone's tensor, in rank order, outside autograd. Shapes may differ along the first dimension."""
    if axis.group is None:
        return [value.detach().clone()]
    length = torch.tensor([value.shape[0]], device=value.device)
    lengths = [torch.empty_like(length) for _ in range(axis.size)]
    dist.all_gather(lengths, length, group=axis.group)
    longest = max(int(n) for n in lengths)
    padded = value.new_zeros((longest, *value.shape[1:]))
    padded[: value.shape[0]] = value.detach()
    # bool has no wire type in every backend; bytes do.
    wire = padded.to(torch.uint8) if value.dtype == torch.bool else padded
    pieces = [torch.empty_like(wire) for _ in range(axis.size)]
    dist.all_gather(pieces, wire, group=axis.group)
    return [piece[: int(n)].to(value.dtype) for piece, n in zip(pieces, lengths, strict=True)]


def _reduced(value: Tensor, axis: Axis, op: Any) -> Tensor:
    out = value.detach().clone().contiguous()
    if axis.group is not None:
        dist.all_reduce(out, op=op, group=axis.group)
    return out


class _SumIdentity(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumSum(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=ctx.group)
        return out, None


class _IdentitySum(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        out = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=ctx.group)
        return out, None


class _GatherScatter(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup, size: int, rank: int, dim: int) -> Tensor:
        ctx.group, ctx.size, ctx.rank, ctx.dim = group, size, rank, dim
        local = local.contiguous()
        pieces = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(pieces, local, group=group)
        return torch.cat(pieces, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        # Leading dimension is the owner; reduce_scatter is absent from some gloo builds, so it is a capability.
        stacked = torch.stack(gradient.chunk(ctx.size, dim=ctx.dim)).contiguous()
        if dist.get_backend(ctx.group) == "nccl":
            own = torch.empty_like(stacked[0])
            dist.reduce_scatter(own, list(stacked), group=ctx.group)
        else:
            dist.all_reduce(stacked, group=ctx.group)
            own = stacked[ctx.rank].clone()
        return own, None, None, None, None
