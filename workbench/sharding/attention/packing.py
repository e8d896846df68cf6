"""Copies between tensors of tokens and heads and the buffers that collectives take.

Buffers are token-major, as kernels read and decoders make heads. Heads that are dealt to ranks have a piece for each
rank; a rank's heads may be in several parts, which travel one after another.

Letters: t tokens of a rank | R ranks | P parts | H heads | h heads of a rank in a part | d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = torch.complex128
"""A dtype of 16 bytes, the most that a thread of a GPU moves at once; copies of it change no bits."""


def pack_part(heads: Sequence[Tensor], number: int, ranks: int, parts: int) -> Tensor:
    """Pack one part of the heads of some tensors, dealt to ranks; adjacent heads are one rank's.

    Shapes: [1, H, t, d] each, H differs -> [R, t, h, d], with h heads of all tensors one after another.
    """
    views = [_of_part(_token_major(one), number, ranks, parts) for one in heads]
    (_, tokens, _, features), counts = views[0].shape, [view.shape[2] for view in views]
    packed = views[0].new_empty(ranks, tokens, sum(counts), features)
    for place, view in zip(packed.split(counts, dim=2), views, strict=True):
        copy_rows(place, view)
    return packed


def unpack_part(packed: Tensor, heads: Sequence[Tensor], number: int, parts: int) -> None:
    """Undo `pack_part`: write one part of the heads of some tensors, [1, H, t, d] each."""
    ranks = packed.shape[0]
    places = [_of_part(_token_major(one), number, ranks, parts) for one in heads]
    for place, rows in zip(places, packed.split([place.shape[2] for place in places], dim=2), strict=True):
        copy_rows(place, rows)


def empty_heads(like: Tensor, heads: int, tokens: int) -> Tensor:
    """[1, H, t, d] without values, token-major in memory, of the dtype, device and d of another tensor."""
    return like.new_empty(1, tokens, heads, like.shape[-1]).transpose(1, 2)


def pack_key_value(key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Pack keys and values, or their gradients, into one tensor. [1, h, t, d] each -> [t, 2 h, d]."""
    _, heads, tokens, features = key.shape
    packed = key.new_empty(tokens, 2 * heads, features, dtype=dtype or key.dtype)
    copy_rows(packed[:, :heads], _token_major(key))
    copy_rows(packed[:, heads:], _token_major(value))
    return packed


def unpack_key_value(both: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack into views of keys and values. [t, 2 h, d] -> [1, h, t, d] each."""
    key, value = both.transpose(0, 1)[None].chunk(2, dim=1)
    return key, value


def copy_rows(into: Tensor, rows: Tensor) -> None:
    """Copy rows of the last dimension, whatever the strides of the others; outside autograd.

    A GPU moves 16 bytes at a time where rows allow it: torch copies one value at a time if strides are not those of a
    contiguous tensor, 2 to 5 times as slowly (by hand, in a trace on an H200).
    """
    if into.dtype == rows.dtype and _in_words(into) and _in_words(rows):
        into, rows = into.view(_WORD), rows.view(_WORD)
    into.copy_(rows)


def _in_words(rows: Tensor) -> bool:
    """True if every row begins and ends at a multiple of 16 bytes."""
    lengths = rows.shape[-1], *rows.stride()[:-1], rows.storage_offset()  # torch views no other offset as words
    whole = not any(length * rows.itemsize % _WORD.itemsize for length in lengths)
    return whole and rows.stride(-1) == 1 and not rows.data_ptr() % _WORD.itemsize


def _of_part(rows_tHd: Tensor, number: int, ranks: int, parts: int) -> Tensor:
    """View of one part of the heads: [t, R * P * h, d] -> [R, t, h, d]."""
    return rows_tHd.unflatten(1, (ranks, parts, -1))[:, :, number].transpose(0, 1)


def _token_major(heads: Tensor) -> Tensor:
    """View: [1, H, t, d] -> [t, H, d]."""
    return heads.squeeze(0).transpose(0, 1)
