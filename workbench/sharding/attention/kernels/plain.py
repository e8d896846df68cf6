"""Attention in a few lines of torch: any device, any dtype, any mask. The reference for the other kernels.

Query heads that share a key head become additional rows of one GEMM: nothing is repeated, and the gradient of a key
head is summed in the GEMM. Queries are computed in pieces, each against the range of keys that it can see, and sums
are accumulated in place: time and memory grow with what is seen, not with the square of a packed row.

Letters: q queries | k keys | d head dimension | h key heads | g query heads that share a key head | n = g * q rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.sharding.attention.segments import key_ranges
from workbench.sharding.attention.shard import Block

_SCORES = {"cpu": 2**18, "cuda": 2**27}
"""Maximum number of scores in memory, over all heads; on a CPU as many as fit in its cache."""

_WASTE = {"cpu": 2**12, "cuda": 2**22}
"""Masked scores, over all heads, that take about the time of one more piece (some 0.1 ms a layer and direction)."""

_QUERIES = 64
"""Queries of a piece before neighbours are merged: a causal piece wastes half of its square."""


class PlainKernel:
    """Explicit mask and softmax. Computes in float32, or in float64 for float64 inputs."""

    name = "plain"
    least_scores = 0

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """None: it supports every block."""
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`. Output in the compute dtype, log-normalisers in float64."""
        row, order_q, order_k = _in_row_order(block)
        key_hkd, value_hkd = _sorted(key, order_k), _sorted(value, order_k)
        query_hgqd = _grouped(_sorted(query, order_q), key_hkd)
        group = query_hgqd.shape[1]
        out_hgqd = torch.zeros_like(query_hgqd)
        lse_hgq = query_hgqd.new_full(query_hgqd.shape[:3], -torch.inf, dtype=torch.float64)
        for piece, mask_nk in _pieces(query_hgqd, row):
            rows_hnd = _rows(query_hgqd, piece.queries)
            scores_hnk = torch.baddbmm(mask_nk, rows_hnd, key_hkd[:, piece.keys].mT, alpha=scale)
            p_hnk = torch.softmax(scores_hnk, -1)
            lse_hn = scores_hnk.amax(-1).double() - p_hnk.amax(-1).double().log()
            if not piece.every_query_sees:
                blind_n = _blind(row, piece, query_hgqd)
                p_hnk.masked_fill_(blind_n[:, None], 0)
                lse_hn.masked_fill_(blind_n, -torch.inf)
            out_hgqd[:, :, piece.queries] = (p_hnk @ value_hkd[:, piece.keys]).unflatten(1, (group, -1))
            lse_hgq[:, :, piece.queries] = lse_hn.unflatten(1, (group, -1))
        return _unsorted(out_hgqd.flatten(0, 1), order_q), _unsorted(lse_hgq.flatten(0, 1), order_q)

    def backward(
        self,
        d_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
        delta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`. Gradients in the compute dtype."""
        delta = (_in_compute_dtype(d_out) * out).sum(-1) if delta is None else delta
        row, order_q, order_k = _in_row_order(block)
        key_hkd, value_hkd = _sorted(key, order_k), _sorted(value, order_k)
        query_hgqd, d_out_hgqd, delta_hgq1, lse_hgq1 = (
            _grouped(_sorted(x, order_q), key_hkd) for x in (query, d_out, delta[..., None], lse[..., None])
        )
        d_query_hgqd, d_key_hkd, d_value_hkd = map(torch.zeros_like, (query_hgqd, key_hkd, value_hkd))
        for piece, mask_nk in _pieces(query_hgqd, row):
            keys_hkd, values_hkd = key_hkd[:, piece.keys], value_hkd[:, piece.keys]
            rows_hnd, d_rows_hnd, delta_hn1, lse_hn1 = (
                _rows(x, piece.queries) for x in (query_hgqd, d_out_hgqd, delta_hgq1, lse_hgq1)
            )
            if not piece.every_query_sees:
                lse_hn1 = lse_hn1.masked_fill(_blind(row, piece, query_hgqd)[:, None], 0)
            p_hnk = torch.baddbmm(mask_nk, rows_hnd, keys_hkd.mT, alpha=scale).sub_(lse_hn1).exp_()
            d_value_hkd[:, piece.keys].baddbmm_(p_hnk.mT, d_rows_hnd)
            d_scores_hnk = torch.baddbmm(delta_hn1, d_rows_hnd, values_hkd.mT, beta=-1).mul_(p_hnk)
            d_rows_hnd = torch.baddbmm(rows_hnd.new_zeros(()), d_scores_hnk, keys_hkd, beta=0, alpha=scale)
            d_query_hgqd[:, :, piece.queries] = d_rows_hnd.unflatten(1, (query_hgqd.shape[1], -1))
            d_key_hkd[:, piece.keys].baddbmm_(d_scores_hnk.mT, rows_hnd, alpha=scale)
        d_query_nqd = d_query_hgqd.flatten(0, 1)
        return _unsorted(d_query_nqd, order_q), _unsorted(d_key_hkd, order_k), _unsorted(d_value_hkd, order_k)


def _in_compute_dtype(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _grouped(rows_hqd: Tensor, key_hkd: Tensor) -> Tensor:
    """[h * g, q, d] -> [h, g, q, d]."""
    return rows_hqd.unflatten(0, (key_hkd.shape[0], -1))


def _rows(values_hgqd: Tensor, queries: slice) -> Tensor:
    """[h, g, q, d] of some queries -> [h, n, d]."""
    return values_hgqd[:, :, queries].flatten(1, 2)


# ---- queries and keys in the order of the row -----------------------------------------------------------


def _in_row_order(block: Block) -> tuple[Block, Tensor | None, Tensor | None]:
    """The block with queries and keys in the order of their positions, and both orders; None if they are in it."""

    def make() -> tuple[Block, Tensor | None, Tensor | None]:
        order_q, order_k = block.query_positions_q.argsort(), block.key_positions_k.argsort()
        row = Block(
            block.query_positions_q[order_q],
            block.key_positions_k[order_k],
            block.query_documents_q[order_q],
            block.key_documents_k[order_k],
            block.window,
        )
        same_q, same_k = (torch.equal(order, torch.arange(len(order))) for order in (order_q, order_k))
        return row, None if same_q else order_q, None if same_k else order_k

    return block.once("plain order", make)


def _sorted(values: Tensor, order: Tensor | None) -> Tensor:
    """[1, h, t, ...] -> [h, t, ...] in the order of the row, in the compute dtype."""
    return _in_compute_dtype(values[0] if order is None else values[0, :, order.to(values.device)])


def _unsorted(values: Tensor, order: Tensor | None) -> Tensor:
    """Undo `_sorted`, in the compute dtype."""
    return (values if order is None else values[:, order.argsort().to(values.device)])[None]


# ---- pieces --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Adjacent queries, and the range of the sorted keys that any of them sees."""

    queries: slice
    keys: slice
    every_query_sees: bool

    @property
    def scores(self) -> int:
        return (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)

    def merged(self, other: _Piece) -> _Piece:
        """This piece with the next one."""
        keys = slice(min(self.keys.start, other.keys.start), max(self.keys.stop, other.keys.stop))
        touch = self.queries.stop == other.queries.start
        every = touch and self.every_query_sees and other.every_query_sees
        return _Piece(slice(self.queries.start, other.queries.stop), keys, every)


def _pieces(query_hgqd: Tensor, block: Block) -> Iterator[tuple[_Piece, Tensor]]:
    """Every piece with its additive mask [n, k], 0 or -inf. Queries that see no key may be in none.

    Small masks are cached for the other layers.
    """
    device, dtype, (heads, group) = query_hgqd.device, query_hgqd.dtype, query_hgqd.shape[:2]
    most = _SCORES.get(device.type, _SCORES["cuda"])
    pieces = block.once(("plain pieces", device.type, heads * group), lambda: _split(block, device.type, heads * group))

    def mask(piece: _Piece) -> Tensor:
        allowed_qk = block.allowed_on(device, piece.queries, piece.keys)
        return torch.zeros((), dtype=dtype, device=device).where(allowed_qk, -torch.inf).repeat(group, 1)

    if sum(piece.scores for piece in pieces) * group > most:
        return ((piece, mask(piece)) for piece in pieces)
    masks = block.once(("plain masks", device, dtype, heads, group), lambda: [mask(piece) for piece in pieces])
    return zip(pieces, masks, strict=True)


def _split(block: Block, device: str, heads: int) -> list[_Piece]:
    """Split the queries that see any key, so that few masked scores are computed in few pieces."""
    most, waste = (limits.get(device, limits["cuda"]) // heads for limits in (_SCORES, _WASTE))
    pieces: list[_Piece] = []
    for piece in _smallest(block):
        both = pieces[-1].merged(piece) if pieces else piece
        if pieces and both.scores <= most and both.scores - pieces[-1].scores - piece.scores <= waste:
            pieces[-1] = both
        else:
            pieces.append(piece)
    return [part for piece in pieces for part in _thinned(piece, most)]


def _smallest(block: Block) -> Iterator[_Piece]:
    """Up to `_QUERIES` adjacent queries of one document each."""
    first_q, end_q = key_ranges(block)
    lengths = block.query_documents_q.unique_consecutive(return_counts=True)[1].tolist()
    begin = 0
    for length in lengths:
        for start in range(begin, begin + length, _QUERIES):
            stop = min(start + _QUERIES, begin + length)
            sees = end_q[start:stop] > first_q[start:stop]
            if bool(sees.any()):
                keys = slice(int(first_q[start:stop][sees].min()), int(end_q[start:stop][sees].max()))
                yield _Piece(slice(start, stop), keys, bool(sees.all()))
        begin += length


def _thinned(piece: _Piece, most: int) -> Iterator[_Piece]:
    """Split a piece so that the scores of each part fit in memory."""
    step = max(1, most // (piece.keys.stop - piece.keys.start))
    for start in range(piece.queries.start, piece.queries.stop, step):
        yield _Piece(slice(start, min(start + step, piece.queries.stop)), piece.keys, piece.every_query_sees)


def _blind(block: Block, piece: _Piece, query_hgqd: Tensor) -> Tensor:
    """[n] bool, the row sees no key."""
    return ~block.sees_q[piece.queries].to(query_hgqd.device).repeat(query_hgqd.shape[1])
