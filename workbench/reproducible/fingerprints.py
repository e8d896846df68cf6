"""Bitwise fingerprints of tensors, which may be sharded.

The fingerprint of a tensor is a sum modulo 2^64 of one number per element, mixed from its bits and its index in the
unsharded tensor. A sum has no order, so a tensor sharded over tp, ep or dp x cp has the same fingerprint as the
unsharded one; ranks exchange one integer per tensor. Mixing is one to one at every index: if exactly one element
differs, by however little, the fingerprint differs for certain. If several differ, it does with probability 1 - 2^-64.
Zeros of different sign differ, as do NaNs with different bits.

Letters: R rows | C columns | P tensors.

Source: the mixing is SplitMix64's, with an element's bits as seed and its index as count; Steele, Lea and
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
    """Sum of the mixed numbers of the elements of each row.

    An element's index is the sum of its row's and its column's number.

    Formula:  sum over c of mix(bits of values[r, c] + GOLDEN * (rows[r] + columns[c])), modulo 2^64, signed.
    Shapes:   [R, C] of any dtype, [R] and [C] long, on one device -> [R] long.
    Backward: none.

    Example:
        >>> row_fingerprints(torch.zeros(1, 1), torch.tensor([0]), torch.tensor([1]))
        tensor([-2152535657050944081])
    """
    bits_RC = values_RC.detach().contiguous().view(_BITS[values_RC.element_size()])
    if bits_RC.is_cuda and importlib.util.find_spec("triton") is not None:
        from workbench.reproducible.kernels import triton_rows

        return triton_rows.row_fingerprints(bits_RC, rows_R, columns_C)
    pieces = max(1, -(-bits_RC.numel() // _PIECE))  # bounds the memory of the mixed numbers
    columns_C = columns_C * _signed(GOLDEN)
    return torch.cat(
        [
            _mixed(bits.long() + (rows * _signed(GOLDEN))[:, None] + columns_C).sum(1)
            for bits, rows in zip(bits_RC.tensor_split(pieces), rows_R.tensor_split(pieces), strict=True)
        ]
    )


def fingerprint(values: Tensor) -> int:
    """Fingerprint of an unsharded tensor, as an unsigned 64-bit integer.

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
    """Fingerprints of the unsharded parameters (or gradients), from this rank's shards, in one order on all ranks.

    Collective. Returns also the names of tensors whose replicas differ between ranks; both are the same on every rank.
    """
    names, by_name = list(values), [shards[name] for name in values]
    # Which tensors an axis reduces, and which of them have a piece of their own on each of its ranks.
    dense, experts = [not one.over_ep for one in by_name], [one.over_ep for one in by_name]
    reduced = {"tp": [True] * len(names), "shard": dense, "replica": dense}
    is_sharded = {"tp": [one.dim is not None for one in by_name], "shard": [one.over_dp_cp for one in by_name]}
    is_sharded["replica"] = [False] * len(names)
    if any(experts):
        reduced |= {"edp": experts, "ep": experts}
        is_sharded |= {"edp": is_sharded["shard"], "ep": experts}
    sizes = [
        values[name].shape[shards[name].dim or 0] if sharded else 0
        for name, sharded in zip(names, is_sharded["tp"], strict=True)
    ]
    longest = all_max(torch.tensor(sizes, device=mesh.device), mesh["tp"]).tolist()  # the last rank's may be short
    sums_P = torch.stack(
        [_of_piece(values[name], shards[name], piece, mesh) for name, piece in zip(names, longest, strict=True)]
    )
    equal_P = torch.ones_like(sums_P, dtype=torch.bool)
    for axis, sharded in is_sharded.items():
        if not any(reduced[axis]) or mesh[axis].group is None:
            continue
        reduced_P = torch.tensor(reduced[axis], device=sums_P.device)
        sharded_P = torch.tensor(sharded, device=sums_P.device)
        largest_P, smallest_P = all_max(torch.stack([sums_P, ~sums_P]), mesh[axis])  # ~ reverses the order
        equal_P &= ~reduced_P | sharded_P | (largest_P == ~smallest_P)
        sums_P = torch.where(reduced_P, torch.where(sharded_P, all_sum(sums_P, mesh[axis]), largest_P), sums_P)
    unequal_P = (~equal_P).long()
    for axis in ("dp_cp", "tp"):
        unequal_P = all_max(unequal_P, mesh[axis])
    unequal = tuple(name for name, count in zip(names, unequal_P.tolist(), strict=True) if count)
    return dict(zip(names, map(_unsigned, sums_P), strict=True)), unequal


def _of_piece(value: Any, shard: ParameterShard, longest: int, mesh: Mesh) -> Tensor:
    """This rank's part of the sum."""
    local = (value.to_local() if is_shard(value) else value).detach()
    sizes = list(value.shape)
    places = [torch.arange(size, device=local.device) for size in sizes]
    if shard.dim is not None:
        sizes[shard.dim] = sum(shard.parts) or longest * mesh["tp"].size
        places[shard.dim] = _dealt(places[shard.dim], shard.parts, longest, mesh)
    if shard.over_ep:
        sizes[0] *= mesh["ep"].size
        places[0] = places[0] + mesh["ep"].rank * value.shape[0]
    if shard.over_dp_cp:
        over = mesh["edp" if shard.over_ep else "shard"]
        first = over.rank * -(-value.shape[0] // over.size)
        places[0] = places[0][first : first + local.shape[0]]
    return _of_places(local, places, sizes)


def _dealt(places: Tensor, parts: tuple[int, ...], longest: int, mesh: Mesh) -> Tensor:
    """Indices of this rank's piece along the sharded dimension; a piece of each section if there are several."""
    axis = mesh["tp"]
    if not parts:
        return places + axis.rank * longest
    firsts = [sum(parts[:number]) + axis.rank * part // axis.size for number, part in enumerate(parts)]
    ends = [first + part // axis.size for first, part in zip(firsts, parts, strict=True)]
    return torch.cat([torch.arange(*bounds, device=places.device) for bounds in zip(firsts, ends, strict=True)])


def _of_places(values: Tensor, places: list[Tensor], sizes: Any) -> Tensor:
    """Sum over a tensor whose elements have these indices along each dimension of an unsharded tensor of ``sizes``."""
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
    """Logical right shift; the shift of signed integers is arithmetic."""
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _unsigned(number: Tensor) -> int:
    return int(number) & ((1 << 64) - 1)
