"""Variable-length kernel calls for a block of attention: index computations only, once per row.

Sort the keys of a block by their position in the row. Each query then sees a contiguous range of the sorted keys. Walk
over the queries in order: while the range grows at its end by one key per query, they are the bottom-right corner of a
causal call; while it does not grow, a call without a mask; if it loses at most one key per query at its front, a window
of constant width. Contiguous and zigzag shards give one segment per document and chunk; a striped shard, whose ranges
grow by cp keys per query, one per query, unless its keys are those of one rank, as in a ring.

Letters: q queries | k keys | s segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.sharding.attention.shard import Block

Rows = slice | Tensor
"""Rows of a tensor: a slice, taken as a view, or their indices."""


@dataclass(frozen=True)
class Segment:
    """Adjacent queries and a range of the sorted keys, with the mask of a variable-length kernel between them.

    Attributes:
        queries: (first, end), in the order of the block's queries.
        keys: (first, end), in the order of the keys sorted by position.
        causal: True: the last query sees up to the last key, the one before it one key less. False: all see up to the
            last key. None: there is one query, for which both are the same.
        window: keys that the last query sees, if not all; the query before it sees as many, one earlier, or all.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool | None
    window: int | None


@dataclass(frozen=True)
class Call:
    """One call of a variable-length attention kernel: many segments that share a mask.

    Attributes:
        causal: bottom-right causal in every segment, or no mask.
        window: maximum number of keys that a query sees, itself (or its diagonal) included; None: all.
        query_rows: rows of the block's queries, in the order of the call.
        key_rows: rows of the block's keys. A slice may include keys that no query of the call sees: they are segments
            without queries.
        query_starts: [s + 1] int32 start of each segment among the rows, and the end.
        key_starts: [s + 1] the same of the keys.
        longest_query: queries, and longest_key keys, of the longest segment.
        repeats: True if a key occurs in key_rows more than once.
    """

    causal: bool
    window: int | None
    query_rows: Rows
    key_rows: Rows
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int
    repeats: bool

    def to(self, device: torch.device) -> Call:
        """Return the call with its tensors on a device."""
        moved: dict[str, Any] = {k: value.to(device) for k, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def segments_of(block: Block) -> list[Segment]:
    """Split the queries of a block that see any key into maximal segments; computed once per block."""
    return block.once("segments", lambda: _find_segments(block))


def _find_segments(block: Block) -> list[Segment]:
    first_q, end_q = key_ranges(block)
    firsts, ends = first_q.tolist(), end_q.tolist()
    segments = []
    for (begin, stop), grows in _runs(first_q, end_q, block.query_documents_q):
        first, last, end = firsts[begin], firsts[stop - 1], ends[stop - 1]
        segments.append(Segment((begin, stop), (first, end), grows, end - last if last > first else block.window))
    return segments


def key_ranges(block: Block) -> tuple[Tensor, Tensor]:
    """[q] first and end of the sorted keys that each query sees; equal if it sees none."""
    places_k, order_k = block.key_positions_k.sort()
    places_q, documents_k = block.query_positions_q, block.key_documents_k[order_k]
    end_q = torch.searchsorted(places_k, places_q, right=True)
    opens_k = torch.ones_like(documents_k, dtype=torch.bool)
    opens_k[1:] = documents_k[1:] != documents_k[:-1]
    opening_k = torch.where(opens_k, torch.arange(len(documents_k)), 0).cummax(0).values
    first_q = torch.where(block.sees_q, opening_k[(end_q - 1).clamp_min(0)], end_q) if len(documents_k) else end_q
    if block.window is not None:
        first_q = first_q.maximum(torch.searchsorted(places_k, places_q - block.window, right=True))
    return first_q, end_q


def _runs(first_q: Tensor, end_q: Tensor, documents_q: Tensor) -> Iterator[tuple[tuple[int, int], bool | None]]:
    """((first, end) queries, True if their keys grow by one per query) of every segment; None for a single query.

    Segments end with documents: a one-token document would otherwise merge with the next one's first token.
    """
    grown, lost = end_q.diff(), first_q.diff()
    seen_q = end_q > first_q
    joined = seen_q[1:] & seen_q[:-1] & (documents_q[1:] == documents_q[:-1])
    joined &= (grown >= 0) & (grown <= 1) & (lost >= 0) & (lost <= 1)
    steps, counts = torch.where(joined, 2 * grown + lost, -1).unique_consecutive(return_counts=True)
    seen = seen_q.tolist()
    begin, at, grows, loses = 0, 0, None, False
    for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
        kind = bool(step // 2), bool(step % 2)
        fits = step >= 0 and (grows is None or (kind[0] == grows and kind[1] >= loses))
        cuts = 0 if fits else 1 if step >= 0 else count
        for end in range(at + 1, at + 1 + cuts):
            if seen[begin]:
                yield (begin, end), grows
            begin, grows = end, None
        if fits or (step >= 0 and count > 1):
            grows, loses = kind
        at += count
    if seen and seen[begin]:
        yield (begin, len(seen)), grows


def find_calls(block: Block) -> list[Call]:
    """Return the calls that compute a block; every query that sees any key is in exactly one of them."""
    segments = segments_of(block)
    single_is_causal = {segment.causal for segment in segments} != {None, False}
    by_mask: dict[tuple[bool, int | None], list[Segment]] = {}
    for segment in segments:
        causal = single_is_causal if segment.causal is None else segment.causal
        by_mask.setdefault((causal, segment.window), []).append(segment)
    order_k = block.key_positions_k.argsort()
    return [_call(causal, window, group, order_k, block.shape) for (causal, window), group in by_mask.items()]


def _call(
    causal: bool, window: int | None, segments: Sequence[Segment], order_k: Tensor, shape: tuple[int, int]
) -> Call:
    query_rows = torch.cat([torch.arange(*segment.queries) for segment in segments])
    key_rows = torch.cat([order_k[slice(*segment.keys)] for segment in segments])
    queries = [segment.queries[1] - segment.queries[0] for segment in segments]
    keys = [segment.keys[1] - segment.keys[0] for segment in segments]
    repeats = len(key_rows.unique()) < len(key_rows)
    rows: Rows = key_rows
    if (ends := _in_place(key_rows, keys)) is not None:
        rows = slice(0, shape[1])
        queries, keys = _with_gaps(queries, keys, ends, shape[1])
    return Call(
        causal, window, _as_slice(query_rows), rows, _starts(queries), _starts(keys), max(queries), max(keys), repeats
    )


def _in_place(key_rows: Tensor, keys: Sequence[int]) -> list[int] | None:
    """End of each segment's keys among all keys, if they are already in the order of the call; None otherwise."""
    ends = torch.tensor(keys).cumsum(0)
    apart = key_rows.diff()
    inside = torch.ones(len(apart), dtype=torch.bool)
    inside[ends[:-1] - 1] = False
    if not bool((apart > 0).all() and (apart[inside] == 1).all()):
        return None
    return (key_rows[ends - 1] + 1).tolist()


def _with_gaps(
    queries: Sequence[int], keys: Sequence[int], ends: Sequence[int], total: int
) -> tuple[list[int], list[int]]:
    """Lengths of the segments, with segments without queries inserted over the keys that none of them sees.

    Gaps are split to about the length of the longest segment, because a kernel sizes its launch by the longest one.
    """
    longest = max(*keys, 512)
    all_queries, all_keys, at = [], [], 0
    for own_queries, own_keys, end in zip([*queries, 0], [*keys, 0], [*ends, total], strict=True):
        gap = end - own_keys - at
        pieces = [longest] * (gap // longest) + [gap % longest] * (gap % longest > 0)
        all_queries += [0] * len(pieces) + [own_queries] * (own_keys > 0)
        all_keys += pieces + [own_keys] * (own_keys > 0)
        at = end
    return all_queries, all_keys


def _as_slice(rows: Tensor) -> Rows:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows  # they increase


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
