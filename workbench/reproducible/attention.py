"""Exact attention: each canonical block of queries separately, over its own keys; key gradients as exact sums.

Letters: T packed tokens | t tokens of a rank | H key heads | d head dimension | k keys of a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.reproducible.blocks import RowBlocks
from workbench.reproducible.modules import Pieces
from workbench.sharding.attention.gathered import pack_key_value
from workbench.sharding.collectives import all_max

PARTIALS = 20
"""Bits reserved for the sum: at most 2^20 blocks attend to a key."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: RowBlocks, pieces: Pieces, window: int | None, scale: float
) -> Tensor:
    """Attention of this rank's queries over the row.

    A query attends to at most ``window`` tokens, or to its whole document.

    Shapes:   query [1, Hq, t, d], key and value [1, H, t, d] -> [1, Hq, t, d].
    Backward: every block gives a partial gradient of its keys and values; they are summed as integers in multiples of a
              power of two, set by each head's largest partial, over all blocks of all cp ranks. One gradient that is
              not finite makes all gradients of its head NaN.
    """
    return _Attention.apply(query, key, value, blocks, pieces, window, scale)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: RowBlocks,
        canonical: Pieces,
        window: int | None,
        scale: float,
    ) -> Tensor:
        kernels, pieces = canonical.kernels, canonical.here
        ctx.blocks, ctx.pieces, ctx.kernels, ctx.scale = blocks, pieces, kernels, scale
        ctx.spans = blocks.spans(window)
        query_tHd, both_tHd = _tokens_first(query), pack_key_value(key, value)
        heads_and_row = zip(query_tHd.chunk(pieces, 1), _gathered(both_tHd, blocks, pieces), strict=True)
        results = [kernels.attend(heads.contiguous(), *row, ctx.spans, scale) for heads, row in heads_and_row]
        outs, lses = zip(*results, strict=True)
        out_tHd = torch.cat(outs, 1) if pieces > 1 else outs[0]
        ctx.save_for_backward(query_tHd, both_tHd, out_tHd, *lses)
        return _heads_first(out_tHd)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        blocks, pieces = ctx.blocks, ctx.pieces
        query_tHd, both_tHd, out_tHd, *lses = ctx.saved_tensors
        inputs = [rows_tHd.chunk(pieces, 1) for rows_tHd in (_tokens_first(d_out), query_tHd, out_tHd)]
        d_queries, d_both = [], []
        for d_heads, heads, out, (keys, values), lse in zip(
            *inputs, _gathered(both_tHd, blocks, pieces), lses, strict=True
        ):
            d_query, partials = ctx.kernels.attend_back(
                d_heads.contiguous(), heads.contiguous(), keys, values, out.contiguous(), lse, ctx.spans, ctx.scale
            )
            d_queries.append(d_query)
            d_both.append(_summed(ctx, partials, len(keys)))
        d_key, d_value = (torch.cat(halves, 1).to(both_tHd.dtype) for halves in zip(*d_both, strict=True))
        return *map(_heads_first, (torch.cat(d_queries, 1), d_key, d_value)), None, None, None, None


def _gathered(both_tHd: Tensor, blocks: RowBlocks, pieces: int) -> list[tuple[Tensor, Tensor]]:
    """Gather keys and values of the row, in its order, for each piece of the heads."""
    keys_THd, values_THd = blocks.gather(both_tHd).chunk(2, 1)
    return [
        (keys.contiguous(), values.contiguous())
        for keys, values in zip(keys_THd.chunk(pieces, 1), values_THd.chunk(pieces, 1), strict=True)
    ]


def _summed(ctx: Any, partials: list[tuple[Tensor, Tensor]], row: int) -> list[Tensor]:
    """Sum the gradients of this rank's keys and values over the partials of all blocks on all ranks."""
    blocks: RowBlocks = ctx.blocks
    heads, width = partials[0][0].shape[1:]
    peak_H = torch.zeros(2 * heads, device=partials[0][0].device)
    for pair in partials:
        for peak_h, partial in zip(peak_H.chunk(2), pair, strict=True):
            ctx.kernels.raise_head_peaks(peak_h, partial)
    # A maximum over ranks may drop NaN, but not infinity.
    peak_H = all_max(peak_H.nan_to_num(nan=torch.inf, posinf=torch.inf), blocks.axis)
    scale_H = _power_of_two(62 - PARTIALS - torch.frexp(peak_H).exponent)
    total_THd = torch.zeros(row, 2 * heads, width, dtype=torch.int64, device=peak_H.device)
    for span, pair in zip(ctx.spans, partials, strict=True):
        for total_kHd, scale_h, partial in zip(total_THd[span.keys].chunk(2, 1), scale_H.chunk(2), pair, strict=True):
            ctx.kernels.add_scaled(total_kHd, scale_h, partial)
    summed_tHd = blocks.scatter_sum(total_THd).double() / scale_H[:, None]
    return list((summed_tHd + 0 * peak_H[:, None]).chunk(2, 1))  # 0 times infinity marks what is not finite


def _power_of_two(exponent: Tensor) -> Tensor:
    """Power of two in float32, clamped to its normal range."""
    return (exponent.int().clamp(-126, 127) + 127 << 23).view(torch.float32)


def _tokens_first(heads: Tensor) -> Tensor:
    """[1, H, t, d] -> [t, H, d]."""
    return heads[0].transpose(0, 1).contiguous()


def _heads_first(rows_tHd: Tensor) -> Tensor:
    return rows_tHd.transpose(0, 1)[None]
