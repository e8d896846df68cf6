"""Collectives, each with its adjoint stated.

A forward all-reduce has two possible adjoints; the right one depends on how the result is used. They are two
functions with two names here; the wrong one scales gradients by the size of the axis and changes no loss. Every rank
of an axis calls the same ones in the same order, also a rank that has nothing to add. On an axis of size 1 each is the
identity. Each call is recorded by `workbench.sharding.flight`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.sharding import flight, wire
from workbench.sharding.mesh import Axis

Item = TypeVar("Item")

BUCKET_BYTES = 64 * 2**20
"""Size up to which many tensors share a collective."""


def sum_identity(partial: Tensor, axis: Axis) -> Tensor:
    """Complete a partial sum whose result every rank then uses for the *same* computation.

    Backward: identity. Correct if the incoming gradient is already the same on all ranks (Megatron's g: the output
              of a row-parallel layer), or if each rank's loss is its own share and the shares are summed
              afterwards.
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (g).
    """
    return _paired("sum_identity", _total, _same, partial, axis)


def sum_sum(partial: Tensor, axis: Axis) -> Tensor:
    """Complete a partial sum whose result every rank then uses for a *different* computation.

    Backward: all-reduce sum of the gradients from each rank's part of the loss.
    """
    return _paired("sum_sum", _total, _total, partial, axis)


def identity_sum(value: Tensor, axis: Axis) -> Tensor:
    """Use a replicated value in computations that differ by rank.

    Backward: all-reduce sum of the gradients from the ranks' computations (Megatron's f: the input of a
              column-parallel layer, and the hidden states that a vocabulary-parallel head reads).
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (f).
    """
    return _paired("identity_sum", _same, _total, value, axis)


def gather_scatter(local: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate equal shards along a dimension, in rank order; each rank uses the whole differently.

    Shapes:   [..., t, ...] -> [..., t * size, ...] along ``dim``.
    Backward: reduce-scatter sum: the ranks' gradients of a shard are summed and returned to its owner.
    """
    return _paired("gather_scatter", _concatenated, _summed_piece, local, axis, dim)


def scatter_gather(partial: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Complete a partial sum of which each rank keeps its own piece along a dimension; the axis divides it.

    Shapes:   [..., t * size, ...] -> [..., t, ...] along ``dim``.
    Backward: all-gather: each rank's part of the sum went into every piece.
    Source:   sequence parallelism, arXiv 2205.05198, section 4.2.2 (g-bar).
    """
    return _paired("scatter_gather", _summed_piece, _concatenated, partial, axis, dim)


def gather_slice(local: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Concatenate equal shards along a dimension, in rank order; every rank uses the whole for the *same* computation.

    Shapes:   [..., t, ...] -> [..., t * size, ...] along ``dim``.
    Backward: this rank's own piece. The incoming gradient is already complete on every rank; a sum over the ranks
              (`gather_scatter`) would be too large by the size of the axis.
    """
    return _paired("gather_slice", _concatenated, _own_piece, local, axis, dim)


def slice_gather(whole: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """Keep this rank's piece, along a dimension, of a value that is the same on every rank; the axis divides it.

    Shapes:   [..., t * size, ...] -> [..., t, ...] along ``dim``.
    Backward: all-gather: the gradient of the whole, the same on every rank again.
    Source:   sequence parallelism, arXiv 2205.05198; the scatter to the sequence-parallel region of Megatron-LM.
    """
    return _paired("slice_gather", _own_piece, _concatenated, whole, axis, dim)


def all_sum(value: Tensor, axis: Axis) -> Tensor:
    """Sum over an axis, outside autograd. Returns a new tensor."""
    return _reduced("all_sum", value, axis)


def all_sum_(tensors: Sequence[Tensor], axis: Axis, *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Sum each of many tensors over an axis, in place, outside autograd, in few collectives.

    Adjacent tensors of one dtype share a bucket until it is full, and a bucket is one collective; a tensor that fills
    one is reduced in place. Every rank passes the same shapes in the same order.
    """
    if axis.group is None:
        return
    for bucket in buckets(map(Tensor.detach, tensors), bucket_bytes, lambda one: (one.dtype, one.nbytes)):
        flat = _flat(bucket)
        with _in("all_sum_", flat, axis):
            wire.all_reduce(flat, axis.group)
        _unflatten(flat, bucket)


def start_all_sum_(bucket: Sequence[Tensor], axis: Axis) -> Callable[[], None]:
    """Start `all_sum_` of tensors of one dtype, in one collective; return a function to call once, which waits for it.

    Nothing may read or write the tensors before.
    """
    if axis.group is None:
        return lambda: None
    bucket = [tensor.detach() for tensor in bucket]
    flat = _flat(bucket)
    with _in("start_all_sum_", flat, axis):
        wait = wire.start_all_reduce(flat, axis.group)

    def arrive() -> None:
        with _in("end of all_sum_", flat, axis):
            wait()
        _unflatten(flat, bucket)

    return arrive


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    """One tensor of all elements: the memory of a single contiguous one, else a copy."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return bucket[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in bucket])


def _unflatten(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    """Copy all elements back to the tensors; the inverse of `_flat`."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        return
    for tensor, piece in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(piece.view_as(tensor))


def all_max(value: Tensor, axis: Axis) -> Tensor:
    """Maximum over an axis, outside autograd. Returns a new tensor."""
    return _reduced("all_max", value, axis, largest=True)


def all_gather(value: Tensor, axis: Axis) -> list[Tensor]:
    """Gather the tensors of all ranks, in rank order, outside autograd. The first dimension may differ."""
    if axis.group is None:
        return [value.detach().clone()]
    return next(gather_many([value], axis))


def gather_many(tensors: Sequence[Tensor], axis: Axis, *, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Yield for each tensor those of all ranks, in rank order, outside autograd. First dimensions may differ.

    One collective for all lengths and one for each bucket, see `all_sum_`. Every rank passes as many tensors, and
    takes as many from the iterator. The pieces are views of a bucket.
    """
    if axis.group is None or not tensors:
        yield from ([tensor.detach()] for tensor in tensors)
        return
    rows_P = torch.tensor([tensor.shape[0] for tensor in tensors], device=tensors[0].device)
    with _in("all_gather of lengths", rows_P, axis):
        rows_RP = torch.stack(wire.all_gather(rows_P, axis.group, axis.size)).tolist()
    row_P = [math.prod(tensor.shape[1:]) for tensor in tensors]

    def largest(place: int) -> tuple[torch.dtype, int]:  # of all ranks, so that all of them fill the same buckets
        dtype = tensors[place].dtype
        return dtype, max(rows[place] for rows in rows_RP) * row_P[place] * dtype.itemsize

    for places in buckets(range(len(tensors)), bucket_bytes, largest):
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        sizes_R = [[rows[place] * row_P[place] for place in places] for rows in rows_RP]
        # Not every backend has a wire type for bool; all have one for bytes.
        sent = flat.new_zeros(max(map(sum, sizes_R)), dtype=torch.uint8 if flat.dtype == torch.bool else flat.dtype)
        sent[: len(flat)] = flat
        with _in("all_gather", sent, axis):
            gathered = wire.all_gather(sent, axis.group, axis.size)
        split_R = [whole[: sum(sizes)].split(sizes) for whole, sizes in zip(gathered, sizes_R, strict=True)]
        for number, place in enumerate(places):
            pieces = zip(split_R, rows_RP, strict=True)
            tail = tensors[place].shape[1:]
            yield [piece[number].view(rows[place], *tail).to(flat.dtype) for piece, rows in pieces]


def buckets(
    items: Iterable[Item], limit: int, measure: Callable[[Item], tuple[torch.dtype, int]]
) -> Iterator[list[Item]]:
    """Group adjacent items of one dtype whose sizes (``measure``) add up to at most ``limit``, or single items."""
    bucket: list[Item] = []
    free, last = limit, torch.float32
    for item in items:
        dtype, size = measure(item)
        if bucket and (size > free or dtype != last):
            yield bucket
            bucket, free = [], limit
        bucket.append(item)
        free, last = free - size, dtype
    if bucket:
        yield bucket


def gather_equal(value: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """Gather the tensors of all ranks, in rank order, outside autograd; all of one shape.

    Shapes: [...] -> [R, ...].
    """
    if axis.group is None:
        return value[None]
    value = value.contiguous()
    with _in("gather_equal", value, axis, caller):
        gathered_R = value.new_empty(axis.size, *value.shape)
        wire.all_gather_into(gathered_R.view(-1), value.view(-1), axis.group)
        return gathered_R


def start_gather(value: Tensor, axis: Axis, *, caller: str | None = None) -> Callable[[], Tensor]:
    """Start `gather_equal`; return a function to call once, which waits for the tensors and returns them."""
    if axis.group is None:
        return lambda: value[None]
    value = value.contiguous()
    gathered_R = value.new_empty(axis.size, *value.shape)
    with _in("start_gather", value, axis, caller):
        wait = wire.start_all_gather_into(gathered_R.view(-1), value.view(-1), axis.group)

    def arrive() -> Tensor:
        with _in("end of gather", value, axis, caller):
            wait()
        return gathered_R

    return arrive


def scatter_sum(pieces_R: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """Sum the pieces of all ranks and return the one at this rank's index (reduce-scatter), outside autograd.

    Shapes: [R, ...] -> [...]. The pieces may be overwritten.
    """
    if axis.group is None:
        return pieces_R[0]
    pieces_R = pieces_R.contiguous()
    with _in("scatter_sum", pieces_R, axis, caller):
        own = torch.empty_like(pieces_R[0])
        wire.reduce_scatter_into(own.view(-1), pieces_R.view(-1), axis.group)
        return own


def start_scatter_sum(pieces_R: Tensor, axis: Axis, *, caller: str | None = None) -> Callable[[], Tensor]:
    """Start `scatter_sum`; return a function to call once, which waits for the sum and returns it."""
    if axis.group is None:
        return lambda: pieces_R[0]
    pieces_R = pieces_R.contiguous()
    own = torch.empty_like(pieces_R[0])
    with _in("start_scatter_sum", pieces_R, axis, caller):
        wait = wire.start_reduce_scatter_into(own.view(-1), pieces_R.view(-1), axis.group)

    def arrive() -> Tensor:
        with _in("end of scatter_sum", pieces_R, axis, caller):
            wait()
        return own

    return arrive


def exchange(pieces_R: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """Send the r-th piece to rank r and receive rank r's at r (all-to-all), outside autograd. Its own adjoint.

    Shapes: [R, ...] -> [R, ...].
    """
    if axis.group is None:
        return pieces_R
    pieces_R = pieces_R.contiguous()
    with _in("exchange", pieces_R, axis, caller):
        return wire.all_to_all(pieces_R, axis.group, axis.rank)


def start_exchange(pieces_R: Tensor, axis: Axis, *, caller: str | None = None) -> Callable[[], Tensor]:
    """Start `exchange`; return a function to call once, which waits for the pieces and returns them."""
    if axis.group is None:
        return lambda: pieces_R
    pieces_R = pieces_R.contiguous()
    with _in("start_exchange", pieces_R, axis, caller):
        arrival = wire.start_all_to_all(pieces_R, axis.group, axis.rank)

    def arrive() -> Tensor:
        with _in("end of exchange", pieces_R, axis, caller):
            return arrival()

    return arrive


def exchange_rows(rows: Tensor, counts_RR: Tensor, axis: Axis, *, caller: str | None = None) -> Tensor:
    """Exchange runs of rows between all ranks (uneven all-to-all), in rank order; outside autograd.

    Shapes: [rows sent, ...] -> [rows received, ...]; counts [R, R] long, on the host, the same on every rank: number
            of rows from rank to rank.
    """
    if axis.group is None:
        return rows
    shape = (int(counts_RR.sum()), *rows.shape[1:])  # total over all ranks, so that ranks record the same shape
    with flight.entering(
        "exchange_rows", axis.name, axis.ranks, wire.group_name(axis.group), shape, rows.dtype, caller=caller
    ):
        return wire.exchange_rows(rows, counts_RR, axis.group, axis.rank)


def start_rotation(value: Tensor, axis: Axis, *, places: int = 1, caller: str | None = None) -> Callable[[], Tensor]:
    """Send a tensor some places on along an axis, to the next rank by default, outside autograd.

    It must not be overwritten before it has arrived.

    Returns:
        A function to call once, which waits for the tensor of the rank as many places before and returns it.
    """
    value = value.contiguous()
    with _in("start_rotation", value, axis, caller):
        arrival = wire.start_rotation(value, _group(axis), axis.rank, axis.size, places)

    def arrive() -> Tensor:
        with _in("end of rotation", value, axis, caller):
            return arrival()

    return arrive


def _group(axis: Axis) -> wire.Group:
    assert axis.group is not None, "an axis of one rank has nothing to communicate"
    return axis.group


def _in(name: str, tensor: Tensor, axis: Axis, caller: str | None = None) -> AbstractContextManager[None]:
    """Record entering and leaving a collective in the flight recorder."""
    group = wire.group_name(axis.group)
    return flight.entering(name, axis.name, axis.ranks, group, tensor.shape, tensor.dtype, caller=caller)


def _reduced(name: str, value: Tensor, axis: Axis, *, largest: bool = False) -> Tensor:
    out = value.detach().clone().contiguous()
    if axis.group is not None:
        with _in(name, out, axis):
            wire.all_reduce(out, axis.group, largest=largest)
    return out


def _paired(name: str, forth: _Operation, back: _Operation, tensor: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    return tensor if axis.group is None else _Paired.apply(tensor, name, forth, back, axis, dim)


class _Paired(Function):
    """A collective and its adjoint."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, name: str, forth: _Operation, back: _Operation, axis: Axis, dim: int
    ) -> Tensor:
        caller = flight.caller()
        ctx.back, ctx.arguments = back, (f"backward of {name}", axis, dim, caller)
        return forth(tensor, name, axis, dim, caller)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return ctx.back(gradient, *ctx.arguments), None, None, None, None, None


_Operation = Callable[[Tensor, str, Axis, int, str | None], Tensor]
"""Function of a tensor, the name in flight records, the axis, a dimension of the tensor, and the caller."""


def _same(value: Tensor, name: str, axis: Axis, dim: int, caller: str | None) -> Tensor:
    return value.view_as(value)


def _total(partial: Tensor, name: str, axis: Axis, dim: int, caller: str | None) -> Tensor:
    out = partial.clone(memory_format=torch.contiguous_format)
    with _in(name, out, axis, caller):
        wire.all_reduce(out, _group(axis))
    return out


def _own_piece(whole: Tensor, name: str, axis: Axis, dim: int, caller: str | None) -> Tensor:
    return whole.chunk(axis.size, dim=dim)[axis.rank].contiguous()


def _concatenated(local: Tensor, name: str, axis: Axis, dim: int, caller: str | None) -> Tensor:
    """Concatenate the tensors of all ranks along a dimension, without a copy if all dimensions before it are 1."""
    dim, local = dim % local.dim(), local.contiguous()
    before, tokens, after = local.shape[:dim], local.shape[dim], local.shape[dim + 1 :]
    in_place = before.numel() == 1
    gathered = (
        local.new_empty(*before, axis.size * tokens, *after) if in_place else local.new_empty(axis.size, *local.shape)
    )
    with _in(name, local, axis, caller):
        wire.all_gather_into(gathered.view(-1), local.view(-1), _group(axis))
    return gathered if in_place else gathered.movedim(0, dim).flatten(dim, dim + 1)


def _summed_piece(whole: Tensor, name: str, axis: Axis, dim: int, caller: str | None) -> Tensor:
    """This rank's piece, along a dimension, of the sum over ranks."""
    pieces_R = torch.stack(whole.chunk(axis.size, dim=dim))  # the first dimension is the owner
    own = torch.empty_like(pieces_R[0])
    with _in(name, pieces_R, axis, caller):
        wire.reduce_scatter_into(own.view(-1), pieces_R.view(-1), _group(axis))
    return own
