"""Fingerprints of tensors, bit by bit, that no rank needs to hold whole.

The fingerprint of a tensor is a sum modulo 2^64: of each element one number, well mixed from its bits and its place in
the whole tensor. A sum has no order, so a tensor that lies in pieces over tp, or over dp x cp, has the fingerprint that
it has in one piece; ranks exchange one integer a tensor. Mixing is one to one at every place: a tensor in which one
element differs, by whatever little, has another fingerprint for certain. Where many differ, it has by all but 2^-64.
Zeros of either sign differ, as do not-a-numbers of several kinds.

Letters: R rows | C columns | P tensors.

Source: the mixing is SplitMix64's, with an element's bits for the seed and its place for the count; Steele, Lea and
        Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 13.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.data_parallel import is_shard
from workbench.sharding.mesh import Mesh
from workbench.sharding.tensor_parallel import ParameterShard

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**20


def row_fingerprints(values_RC: Tensor, rows_R: Tensor, columns_C: Tensor) -> Tensor:
    """For each row the sum of the mixed numbers of its elements.

    Args:
        values_RC: [R, C] of any dtype.
        rows_R: [R] long, on the same device; an element's place is the sum of its row's number and its column's.
        columns_C: [C] long.

    Formula:  sum over c of mix(bits of values[r, c] + GOLDEN * (rows[r] + columns[c])), modulo 2^64, signed.
    Shapes:   [R, C] -> [R] long.
    Backward: none.

    Example:
        >>> row_fingerprints(torch.zeros(1, 1), torch.tensor([0]), torch.tensor([1]))
        tensor([-2152535657050944081])
    """
    bits_RC = values_RC.detach().contiguous().view(_BITS[values_RC.element_size()])
    if bits_RC.is_cuda and importlib.util.find_spec("triton") is not None:
        from workbench.reproducible.kernels import triton_fingerprints

        return triton_fingerprints.row_fingerprints(bits_RC, rows_R, columns_C)
    pieces = max(1, -(-bits_RC.numel() // _PIECE))  # of the mixed numbers, only a piece exists at a time
    columns_C = columns_C * _signed(GOLDEN)
    return torch.cat(
        [
            _mixed(bits.long() + (rows * _signed(GOLDEN))[:, None] + columns_C).sum(1)
            for bits, rows in zip(bits_RC.tensor_split(pieces), rows_R.tensor_split(pieces), strict=True)
        ]
    )


def fingerprint(values: Tensor) -> int:
    """Of a tensor that lies here whole, as an unsigned integer of 64 bits.

    Example:
        >>> one, ulp = torch.ones(3), torch.tensor([1.0, 1.0 + 2**-23, 1.0])
        >>> fingerprint(one) == fingerprint(torch.ones(3)), fingerprint(one) == fingerprint(ulp)
        (True, False)
    """
    sizes = tuple(values.shape)
    return _unsigned(_of_places(values, [torch.arange(size, device=values.device) for size in sizes], sizes))


def fingerprints(
    values: Mapping[str, Any], shards: Mapping[str, ParameterShard], mesh: Mesh
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Of parameters (or gradients) that lie over the ranks as their shards say, whole. Collective.

    Args:
        values: what this rank holds, in the same order on every rank.
        shards: how each lies.
        mesh: the axes.

    Returns:
        The fingerprints, the same on every rank; and the names of those of which two ranks that should hold the same
        hold something else.
    """
    names, dealt = (
        list(values),
        {
            "tp": [shards[name].dim is not None for name in values],
            "dp_cp": [shards[name].over_dp_cp for name in values],
        },
    )
    cut = [
        values[name].shape[shards[name].dim or 0] if there else 0
        for name, there in zip(names, dealt["tp"], strict=True)
    ]
    longest = all_max(torch.tensor(cut, device=mesh.device), mesh["tp"]).tolist()  # the last rank's piece may be short
    said_P = torch.stack(
        [_of_piece(values[name], shards[name], piece, mesh) for name, piece in zip(names, longest, strict=True)]
    )
    alike_P = torch.ones_like(said_P, dtype=torch.bool)
    for axis, there in dealt.items():
        if mesh[axis].group is None:
            continue
        there_P = torch.tensor(there, device=said_P.device)
        largest_P, smallest_P = all_max(torch.stack([said_P, ~said_P]), mesh[axis])  # ~ turns the order around
        alike_P &= there_P | (largest_P == ~smallest_P)
        said_P = torch.where(there_P, all_sum(said_P, mesh[axis]), largest_P)
    unlike = tuple(name for name, alike in zip(names, _everywhere(alike_P, mesh), strict=True) if not alike)
    return dict(zip(names, map(_unsigned, said_P), strict=True)), unlike


def _everywhere(alike_P: Tensor, mesh: Mesh) -> list[bool]:
    """Whether it is so on all ranks of the job."""
    unlike_P = (~alike_P).long()
    for axis in ("dp_cp", "tp"):
        unlike_P = all_max(unlike_P, mesh[axis])
    return (unlike_P == 0).tolist()


def _of_piece(value: Any, shard: ParameterShard, longest: int, mesh: Mesh) -> Tensor:
    """The part of the sum that this rank's elements are."""
    held = (value.to_local() if is_shard(value) else value).detach()
    sizes = list(value.shape)
    places = [torch.arange(size, device=held.device) for size in sizes]
    if shard.dim is not None:
        sizes[shard.dim] = sum(shard.parts) or longest * mesh["tp"].size
        places[shard.dim] = _dealt(places[shard.dim], shard.parts, longest, mesh)
    if shard.over_dp_cp:
        first = mesh["dp_cp"].rank * -(-value.shape[0] // mesh["dp_cp"].size)
        places[0] = places[0][first : first + held.shape[0]]
    return _of_places(held, places, sizes)


def _dealt(places: Tensor, parts: tuple[int, ...], longest: int, mesh: Mesh) -> Tensor:
    """Where along the cut dimension this rank's piece lies in the whole; of several sections a piece each."""
    axis = mesh["tp"]
    if not parts:
        return places + axis.rank * longest
    firsts = [sum(parts[:number]) + axis.rank * part // axis.size for number, part in enumerate(parts)]
    return torch.cat(
        [
            torch.arange(first, first + part // axis.size, device=places.device)
            for first, part in zip(firsts, parts, strict=True)
        ]
    )


def _of_places(values: Tensor, places: list[Tensor], sizes: Any) -> Tensor:
    """The sum over a tensor whose elements have these places along each dimension of a whole of these sizes."""
    steps = [place * math.prod(sizes[dim + 1 :]) for dim, place in enumerate(places)]
    none = torch.zeros(1, dtype=torch.long, device=values.device)
    *before, columns_C = steps or [none]
    rows_R = none
    for step in before:
        rows_R = (rows_R[:, None] + step).flatten()
    return row_fingerprints(values.reshape(len(rows_R), len(columns_C)), rows_R, columns_C).sum()


def _mixed(numbers: Tensor) -> Tensor:
    """SplitMix64's output function, in place."""
    numbers = numbers.bitwise_xor_(_shifted(numbers, 30)).mul_(_signed(FIRST))
    numbers = numbers.bitwise_xor_(_shifted(numbers, 27)).mul_(_signed(SECOND))
    return numbers.bitwise_xor_(_shifted(numbers, 31))


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left, which shifting signed integers does not do."""
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _unsigned(number: Tensor) -> int:
    return int(number) & ((1 << 64) - 1)
