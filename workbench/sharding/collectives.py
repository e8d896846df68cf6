"""Collectives, each with its adjoint stated.

A forward all-reduce has two possible adjoints, and which is right depends on who consumes the result. They are
two functions with two names here; taking the wrong one scales gradients by the size of the axis and changes no
loss. Every rank of an axis calls the same ones in the same order, also a rank that has nothing to add.
On an axis of size 1 each is the identity. What is called is noted in `workbench.sharding.flight`, where others can
see which collective a rank is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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


def scatter_gather(partial: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Complete a partial sum of which each rank keeps its own piece along a dimension; the axis divides it.

    Shapes:   [..., t * size, ...] -> [..., t, ...] along ``dim``.
    Backward: all-gather: each rank's part of the sum went into every piece.
    Source:   sequence parallelism, arXiv 2205.05198, section 4.2.2 (g-bar).
    """
    return partial if axis.group is None else _ScatterGather.apply(partial, axis, dim)


def gather_slice(local: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate equal shards along a dimension, in rank order; every rank uses the whole for the *same* computation.

    Shapes:   [..., t, ...] -> [..., t * size, ...] along ``dim``.
    Backward: this rank's own piece. The gradient that arrives is the whole one on every rank already; a sum over
              the ranks (`gather_scatter`) would be too large by the size of the axis.
    """
    return local if axis.group is None else _GatherSlice.apply(local, axis, dim)


def slice_gather(whole: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Keep this rank's piece, along a dimension, of a value that is the same on every rank; the axis divides it.

    Shapes:   [..., t * size, ...] -> [..., t, ...] along ``dim``.
    Backward: all-gather: the gradient of the whole, the same on every rank again.
    Source:   sequence parallelism, arXiv 2205.05198; the scatter to the sequence-parallel region of Megatron-LM.
    """
    return whole if axis.group is None else _SliceGather.apply(whole, axis, dim)


def all_sum(value: Tensor, axis: Axis) -> Tensor:
    """Sum over an axis, outside autograd. Returns a new tensor."""
    return _reduced("all_sum", value, axis)


def all_sum_(tensors: Sequence[Tensor], axis: Axis, *, bucket_bytes: int = 64 * 2**20) -> None:
    """Sum each of many tensors over an axis, in place, outside autograd, in few collectives.

    Neighbours of one dtype share a bucket until it is full, and a bucket is one collective; a tensor that fills one is
    reduced where it lies. Every rank brings the same shapes in the same order.
    """
    if axis.group is None:
        return
    for bucket in _buckets(tensors, bucket_bytes):
        in_place = len(bucket) == 1 and bucket[0].is_contiguous()
        flat = bucket[0].view(-1) if in_place else torch.cat([tensor.reshape(-1) for tensor in bucket])
        with _in("all_sum_", flat, axis):
            wire.all_reduce(flat, axis.group)
        if not in_place:
            for tensor, piece in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))


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


def _buckets(tensors: Iterable[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, as many as a bucket holds; one at least."""
    bucket: list[Tensor] = []
    room = bucket_bytes
    for tensor in map(Tensor.detach, tensors):
        if bucket and (tensor.nbytes > room or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, room = [], bucket_bytes
        bucket.append(tensor)
        room -= tensor.nbytes
    if bucket:
        yield bucket


def gather_equal(value: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """Everyone's tensor, in rank order, outside autograd; all of one shape.

    Shapes: [...] -> [R, ...].
    """
    if axis.group is None:
        return value[None]
    value = value.contiguous()
    with _in("gather_equal", value, axis, caller):
        everyone_R = value.new_empty(axis.size, *value.shape)
        wire.all_gather_into(everyone_R.view(-1), value.view(-1), axis.group)
        return everyone_R


def scatter_sum(pieces_R: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """Everyone's pieces summed, and of the sums the one at this rank's number, outside autograd.

    Shapes: [R, ...] -> [...]. The pieces may be written to.
    """
    if axis.group is None:
        return pieces_R[0]
    pieces_R = pieces_R.contiguous()
    with _in("scatter_sum", pieces_R, axis, caller):
        own = torch.empty_like(pieces_R[0])
        wire.reduce_scatter_into(own.view(-1), pieces_R.view(-1), axis.group)
        return own


def exchange(pieces_R: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """The r-th piece goes to rank r, and what rank r sent here comes back at r; outside autograd. Its own adjoint.

    Shapes: [R, ...] -> [R, ...].
    """
    if axis.group is None:
        return pieces_R
    pieces_R = pieces_R.contiguous()
    with _in("exchange", pieces_R, axis, caller):
        return wire.all_to_all(pieces_R, axis.group, axis.rank)


def exchange_rows(rows: Tensor, counts_RR: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """Stretches of rows to the others, and theirs back, in rank order; outside autograd.

    Args:
        rows: what goes to rank 0, then what goes to rank 1, ...
        counts_RR: [R, R] long, on the host, the same on every rank: rows that go from rank to rank.
        axis: the ranks.
        caller: where it was called from, if that is not here.

    Shapes: [rows sent, ...] -> [rows received, ...].
    """
    if axis.group is None:
        return rows
    shape = (int(counts_RR.sum()), *rows.shape[1:])  # of all ranks together: ranks agree on it
    with flight.entering(
        "exchange_rows", axis.name, axis.ranks, wire.group_name(axis.group), shape, rows.dtype, caller=caller
    ):
        return wire.exchange_rows(rows, counts_RR, axis.group, axis.rank)


def start_rotation(value: Tensor, axis: Axis, *, caller: str | None = None) -> Callable[[], Tensor]:
    """Send a tensor to the next rank of an axis of several, outside autograd; nobody may write to it until it is there.

    Returns:
        A function to call once, which waits for the tensor of the rank before and returns it.
    """
    value = value.contiguous()
    with _in("start_rotation", value, axis, caller):
        arrival = wire.start_rotation([value], axis.group, axis.rank, axis.size)

    def arrive() -> Tensor:
        with _in("end of rotation", value, axis, caller):
            return arrival()[0]

    return arrive


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
        return _joined("gather_scatter", local, axis, dim, ctx.caller)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed_piece("backward of gather_scatter", gradient, ctx.axis, ctx.dim, ctx.caller), None, None


class _ScatterGather(Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.caller = axis, dim, flight.caller()
        return _summed_piece("scatter_gather", partial, axis, dim, ctx.caller)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined("backward of scatter_gather", gradient, ctx.axis, ctx.dim, ctx.caller), None, None


class _GatherSlice(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _joined("gather_slice", local, axis, dim, flight.caller())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.chunk(ctx.axis.size, dim=ctx.dim)[ctx.axis.rank].contiguous(), None, None


class _SliceGather(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.caller = axis, dim, flight.caller()
        return whole.chunk(axis.size, dim=dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined("backward of slice_gather", gradient, ctx.axis, ctx.dim, ctx.caller), None, None


def _joined(name: str, local: Tensor, axis: Axis, dim: int, caller: str | None) -> Tensor:
    """Everyone's tensor along a dimension; as it came where the dimensions before it are of size 1."""
    dim, local = dim % local.dim(), local.contiguous()
    before, tokens, after = local.shape[:dim], local.shape[dim], local.shape[dim + 1 :]
    as_it_comes = before.numel() == 1
    everyone = (
        local.new_empty(*before, axis.size * tokens, *after)
        if as_it_comes
        else local.new_empty(axis.size, *local.shape)
    )
    with _in(name, local, axis, caller):
        wire.all_gather_into(everyone.view(-1), local.view(-1), axis.group)
    return everyone if as_it_comes else everyone.movedim(0, dim).flatten(dim, dim + 1)


def _summed_piece(name: str, whole: Tensor, axis: Axis, dim: int, caller: str | None) -> Tensor:
    """This rank's piece, along a dimension, of the sum of everyone's tensor."""
    pieces_R = torch.stack(whole.chunk(axis.size, dim=dim))  # the first dimension is the owner
    own = torch.empty_like(pieces_R[0])
    with _in(name, pieces_R, axis, caller):
        wire.reduce_scatter_into(own.view(-1), pieces_R.view(-1), axis.group)
    return own
