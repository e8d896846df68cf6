"""Attention of query blocks by FlashAttention: forward of all blocks in one call, backward block by block.

A piece is the part of one document in one query block. In forward, a thread block of the operator processes a single
piece, so all pieces of a rank go into one call, each with its keys read in place. In backward, the order in which a
query's gradient is summed depends on the amount of work in a call; so a call is one block, whatever else a rank holds.
Such calls leave multiprocessors idle at their ends, and run concurrently on a few streams.

Source: arXiv 2307.08691; `aten::_flash_attention_forward` (``seqused_k``: lengths of keys that begin at ``cum_seq_k``)
        and `_backward`, torch 2.11 to 2.13; its backward is deterministic in torch's deterministic mode.

Letters: t own tokens | S tokens of the row | H heads | d head dimension | P pieces | k keys of a span.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from workbench.reproducible.kernels.plain import determinism

if TYPE_CHECKING:
    from workbench.reproducible.blocks import Span

STREAMS = 3
"""CUDA streams for concurrent backward calls."""


class Cut(NamedTuple):
    """A piece: own queries, and keys of the row up to the last one that the last query attends to."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int


@dataclass(frozen=True)
class Pieces:
    """Pieces in the operator's format: int32 starts [P + 1], ending with the end of the last piece, and lengths [P]."""

    query_starts: Tensor
    key_starts: Tensor
    key_lengths: Tensor
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, cuts: Sequence[Cut], device: torch.device, *, query: int = 0, key: int = 0) -> Pieces:
        """Convert cuts, with offsets relative to a first query and a first key."""
        rows = [[cut.query_start - query, cut.key_start - key, cut.key_stop - cut.key_start] for cut in cuts]
        rows.append([cuts[-1].query_stop - query, cuts[-1].key_stop - key, 0])
        numbers = torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device)
        # with one query in every piece the operator takes a separate path, which is not meant for these
        return cls(
            numbers[0],
            numbers[1],
            numbers[2, :-1],
            max(2, *(cut.query_stop - cut.query_start for cut in cuts)),
            max(cut.key_stop - cut.key_start for cut in cuts),
        )


def refusal(dtype: torch.dtype, device: torch.device, head_dim: int) -> str | None:
    """Reason why FlashAttention cannot take such queries; None if it can."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"flash computes in bfloat16 or float16 on a GPU, and queries are {dtype} on {device.type}"
    if head_dim % 8 or head_dim > 256:
        return f"flash takes head dimensions that are multiples of 8 up to 256, not {head_dim}"
    return None


def attend(
    query_tHd: Tensor, key_SHd: Tensor, value_SHd: Tensor, spans: Sequence[Span], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of all own blocks in one call, with log-normalisers.

    Shapes:   [t, H, d], [S, h, d] twice, where h divides H -> [t, H, d], [H, t] float32.
    """
    pieces = spans[0].seen.once(
        ("all pieces", query_tHd.device),
        lambda: Pieces.of([cut for span in spans for cut in cuts_of(span)], query_tHd.device),
    )
    causal, window = _mask(spans[0].seen.window)
    result = torch.ops.aten._flash_attention_forward(
        query_tHd,
        key_SHd,
        value_SHd,
        pieces.query_starts,
        pieces.key_starts,
        pieces.longest_query,
        pieces.longest_key,
        0.0,
        causal,
        False,
        scale=scale,
        seqused_k=pieces.key_lengths,
        **window,
    )
    return result[0], result[1]


def attend_back(
    d_out_tHd: Tensor,
    query_tHd: Tensor,
    key_SHd: Tensor,
    value_SHd: Tensor,
    out_tHd: Tensor,
    lse_Ht: Tensor,
    spans: Sequence[Span],
    scale: float,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Gradients of own queries, and each block's partial gradients of its keys and values.

    Shapes:   [t, H, d]; for each span [k, h, d] twice.
    """
    device = query_tHd.device
    unused = torch.empty(2, dtype=torch.uint64, device=device)  # random state: there is no dropout
    d_query_tHd, partials = torch.empty_like(query_tHd), []
    here, streams = torch.cuda.current_stream(device), _streams(device)
    with determinism(True):
        for number, span in enumerate(spans):
            pieces, (causal, window) = _own_pieces(span, device), _mask(span.seen.window)
            rows, keys, stream = span.queries, span.keys, streams[number % STREAMS]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                d_query_tHd[rows], d_key_kHd, d_value_kHd = torch.ops.aten._flash_attention_backward(
                    d_out_tHd[rows],
                    query_tHd[rows],
                    key_SHd[keys],
                    value_SHd[keys],
                    out_tHd[rows],
                    lse_Ht[:, rows].contiguous(),
                    pieces.query_starts,
                    pieces.key_starts,
                    pieces.longest_query,
                    pieces.longest_key,
                    0.0,
                    causal,
                    unused,
                    unused,
                    scale=scale,
                    **window,
                )
            partials.append((d_key_kHd, d_value_kHd))
    for stream in streams:
        here.wait_stream(stream)
    return d_query_tHd, partials


def cuts_of(span: Span) -> list[Cut]:
    """Pieces of a span, in the order of its queries; their keys are contiguous."""
    seen, cuts, stop = span.seen, [], 0
    for document, count in zip(
        *(runs.tolist() for runs in seen.query_documents_q.unique_consecutive(return_counts=True)), strict=True
    ):
        start, stop = stop, stop + count
        first = span.keys.start + int((seen.key_documents_k == document).int().argmax())
        cuts.append(
            Cut(span.queries.start + start, span.queries.start + stop, first, int(seen.query_positions_q[stop - 1]) + 1)
        )
    return cuts


def _own_pieces(span: Span, device: torch.device) -> Pieces:
    return span.seen.once(
        ("own pieces", device), lambda: Pieces.of(cuts_of(span), device, query=span.queries.start, key=span.keys.start)
    )


def _mask(window: int | None) -> tuple[bool, dict[str, int]]:
    """True if a call is causal without a window; and the number of keys before and after the diagonal, -1: all."""
    return window is None, {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(STREAMS))
