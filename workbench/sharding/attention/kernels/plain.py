"""Attention in a few lines of torch: any device, any dtype, any mask. The reference for the other kernels.

Queries are computed in pieces, each against the range of keys that it can see, and sums are accumulated in place: time
and memory grow with what is seen, not with the square of a packed row. Pieces of about one size are one batched GEMM:
a row of many short documents is a few of them. Query heads that share a key head are additional rows of its GEMM, so
that nothing is repeated, and the gradient of a key head is summed in the GEMM.

Letters: q queries | k keys | d head dimension | H query heads | h key heads | g query heads that share a key head
| P pieces of a batch | n queries of a piece | m = g * n rows of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from workbench.sharding.attention.segments import key_ranges
from workbench.sharding.attention.shard import Block

_SCORES = {"cpu": 2**18, "cuda": 2**27}
"""Maximum number of scores in memory, over all heads; on a CPU as many as fit in its cache."""

_WASTE = {"cpu": 2**15, "cuda": 2**22}
"""Masked scores in a batch, over all heads, that take the time of one more (some 0.3 ms a layer and direction)."""

_QUERIES = 64
"""Queries of a piece: a causal piece wastes half of its square."""


class PlainKernel:
    """Explicit mask and softmax. Computes in float32, or in float64 for float64 inputs."""

    name = "plain"
    least_scores = 0

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """None: it supports every block."""
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`. Output in the compute dtype, log-normalisers in float64."""
        query_Hqd, key_hkd, value_hkd = map(_with_padding, (query, key, value))
        query_Hqd, groups = query_Hqd * scale, query.shape[1] // key.shape[1]
        out_Hqd = torch.zeros_like(query_Hqd)
        lse_Hq1 = query_Hqd.new_full((*query_Hqd.shape[:2], 1), -torch.inf, dtype=torch.float64)
        for batch in _batches(query_Hqd, block):
            scores_hPmk = batch.scores(batch.rows(query_Hqd, groups), batch.columns(key_hkd))
            p_hPmk = torch.softmax(scores_hPmk, -1)
            lse_hPm1 = scores_hPmk.amax(-1, keepdim=True).double() - p_hPmk.amax(-1, keepdim=True).double().log()
            batch.put_rows(out_Hqd, p_hPmk @ batch.columns(value_hkd))
            batch.put_rows(lse_Hq1, lse_hPm1)
        return out_Hqd[None, :, :-1], lse_Hq1[None, :, :-1, 0]

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`. Gradients in the compute dtype."""
        delta = (_in_compute_dtype(d_out) * out).sum(-1)
        query_Hqd, d_out_Hqd, delta_Hq1, lse_Hq1 = map(
            _with_padding, (query, d_out, delta[..., None], lse[..., None].to(_compute_dtype(query)))
        )
        key_hkd, value_hkd = map(_with_padding, (key, value))
        query_Hqd, groups = query_Hqd * scale, query.shape[1] // key.shape[1]
        d_query_Hqd, d_key_hkd, d_value_hkd = map(torch.zeros_like, (query_Hqd, key_hkd, value_hkd))
        for batch in _batches(query_Hqd, block):
            rows_hPmd, d_rows_hPmd, delta_hPm1, lse_hPm1 = (
                batch.rows(x, groups) for x in (query_Hqd, d_out_Hqd, delta_Hq1, lse_Hq1)
            )
            keys_hPkd, values_hPkd = batch.columns(key_hkd), batch.columns(value_hkd)
            p_hPmk = batch.scores(rows_hPmd, keys_hPkd).sub_(lse_hPm1).exp_()
            batch.add_columns(d_value_hkd, p_hPmk.mT @ d_rows_hPmd)
            d_scores_hPmk = (d_rows_hPmd @ values_hPkd.mT).sub_(delta_hPm1).mul_(p_hPmk)
            batch.put_rows(d_query_Hqd, d_scores_hPmk @ keys_hPkd)
            batch.add_columns(d_key_hkd, d_scores_hPmk.mT @ rows_hPmd)
        return d_query_Hqd[None, :, :-1] * scale, d_key_hkd[None, :, :-1], d_value_hkd[None, :, :-1]


def _compute_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _in_compute_dtype(values: Tensor) -> Tensor:
    return values.to(_compute_dtype(values))


def _with_padding(values: Tensor) -> Tensor:
    """[1, h, t, ...] -> [h, t + 1, ...] in the compute dtype; the last row is 0, for the padding of batches."""
    return pad(_in_compute_dtype(values[0]), (0, 0, 0, 1))


# ---- pieces of about one size, as one computation ------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """Pieces with at most one of each document, so that no key is in two of them.

    Padding reads and writes the last row of every tensor, which `_with_padding` adds and which no result contains.

    Attributes:
        queries_Pn: places of their queries; that of the padding is q.
        keys_Pk: places of the keys that any query of a piece sees; that of the padding is k.
        mask_P1nk: additive mask, 0 or -inf.
    """

    queries_Pn: Tensor
    keys_Pk: Tensor
    mask_P1nk: Tensor

    def rows(self, values_Hqd: Tensor, groups: int) -> Tensor:
        """[H, q + 1, d] -> [h, P, g * n, d]."""
        rows = values_Hqd.index_select(1, self.queries_Pn.flatten())
        return rows.unflatten(1, self.queries_Pn.shape).unflatten(0, (-1, groups)).transpose(1, 2).flatten(2, 3)

    def put_rows(self, into_Hqd: Tensor, rows_hPmd: Tensor) -> None:
        """Set the rows of the queries, as `rows` gave them."""
        rows = rows_hPmd.unflatten(2, (-1, self.queries_Pn.shape[1])).transpose(1, 2)
        into_Hqd.index_copy_(1, self.queries_Pn.flatten(), rows.flatten(2, 3).flatten(0, 1))

    def columns(self, values_hkd: Tensor) -> Tensor:
        """[h, k + 1, d] -> [h, P, k, d]."""
        return values_hkd.index_select(1, self.keys_Pk.flatten()).unflatten(1, self.keys_Pk.shape)

    def add_columns(self, into_hkd: Tensor, columns_hPkd: Tensor) -> None:
        """Add to the keys; only the padding is in `keys_Pk` more than once."""
        keys = self.keys_Pk.flatten()
        into_hkd.index_copy_(1, keys, into_hkd.index_select(1, keys).add_(columns_hPkd.flatten(1, 2)))

    def scores(self, rows_hPmd: Tensor, keys_hPkd: Tensor) -> Tensor:
        """[h, P, m, k] products of rows and keys, -inf where masked."""
        scores_hPmk = rows_hPmd @ keys_hPkd.mT
        scores_hPmk.unflatten(2, (-1, self.queries_Pn.shape[1])).add_(self.mask_P1nk)
        return scores_hPmk


def _batches(query_Hqd: Tensor, block: Block) -> Iterator[_Batch]:
    """Every batch of a block. Small masks are cached for the other layers."""
    device, dtype, heads = query_Hqd.device, query_Hqd.dtype, query_Hqd.shape[0]
    most = _SCORES.get(device.type, _SCORES["cuda"])
    batches = block.once(("plain pieces", device.type, heads), lambda: _split(block, device.type, heads))
    if sum(map(_scores, batches)) > most:
        return (_batch(block, batch, device, dtype) for batch in batches)
    return iter(
        block.once(
            ("plain masks", device, dtype, heads),
            lambda: [_batch(block, batch, device, dtype) for batch in batches],
        )
    )


class _Piece(NamedTuple):
    """Queries of one document, and the keys that any of them sees, as places in the tensors of a block.

    ``number`` counts the pieces of the document; ``size`` is (n, k).
    """

    number: int
    size: tuple[int, int]
    queries_n: Tensor
    keys_k: Tensor


def _split(block: Block, device: str, heads: int) -> list[list[_Piece]]:
    """Batch the pieces of a block, so that few masked scores are computed in few batches."""
    most, waste = (limits.get(device, limits["cuda"]) // heads for limits in (_SCORES, _WASTE))
    batches: list[list[_Piece]] = []
    longest_n = longest_k = needed = 0  # of the last batch
    for piece in sorted(_pieces(block, most), key=lambda piece: piece[:2]):
        last, (n, k) = batches[-1] if batches else [], piece.size
        both = (len(last) + 1) * max(longest_n, n) * max(longest_k, k)
        if last and last[0].number == piece.number and both <= most and both - needed - n * k <= waste:
            last.append(piece)
            longest_n, longest_k, needed = max(longest_n, n), max(longest_k, k), needed + n * k
        else:
            batches.append([piece])
            longest_n, longest_k, needed = n, k, n * k
    return batches


def _scores(pieces: list[_Piece]) -> int:
    """Scores of a head that a batch computes, with those of its padding."""
    lengths_n, lengths_k = zip(*(piece.size for piece in pieces), strict=True)
    return len(pieces) * max(lengths_n) * max(lengths_k)


def _pieces(block: Block, most: int) -> Iterator[_Piece]:
    """Up to `_QUERIES` queries of one document each, fewer if their scores would be more than ``most``.

    Queries that see no key are in none.
    """
    order_q, order_k = block.query_positions_q.argsort(), block.key_positions_k.argsort()
    documents_q, documents_k = block.query_documents_q[order_q], block.key_documents_k[order_k]
    in_row = Block(
        block.query_positions_q[order_q], block.key_positions_k[order_k], documents_q, documents_k, block.window
    )
    first_q, end_q = key_ranges(in_row)
    sees_q = end_q > first_q
    queries, firsts, ends = order_q[sees_q], first_q[sees_q].tolist(), end_q[sees_q].tolist()
    stop = 0
    for length in documents_q[sees_q].unique_consecutive(return_counts=True)[1].tolist():
        start, stop, number = stop, stop + length, 0
        while start < stop:
            end = min(start + _QUERIES, stop)
            first, last = min(firsts[start:end]), max(ends[start:end])
            end = min(end, start + max(1, most // (last - first)))
            yield _Piece(number, (end - start, last - first), queries[start:end], order_k[first:last])
            start, number = end, number + 1


_PADDING = 2**62
"""Position of padding, after every other; `pad` takes its value as a float64, so a power of two."""


def _batch(block: Block, pieces: list[_Piece], device: torch.device, dtype: torch.dtype) -> _Batch:
    q, k = block.shape
    queries_Pn = pad_sequence([piece.queries_n for piece in pieces], batch_first=True, padding_value=q).to(device)
    keys_Pk = pad_sequence([piece.keys_k for piece in pieces], batch_first=True, padding_value=k).to(device)
    query_positions_Pn1 = pad(block.query_positions_q, (0, 1), value=_PADDING).to(device)[queries_Pn][..., None]
    key_positions_P1k = pad(block.key_positions_k, (0, 1), value=_PADDING).to(device)[keys_Pk][:, None]
    allowed_Pnk = query_positions_Pn1 >= key_positions_P1k  # of one document are all keys of a piece
    if block.window is not None:
        allowed_Pnk &= query_positions_Pn1 - key_positions_P1k < block.window
    mask_Pnk = torch.zeros((), dtype=dtype, device=device).where(allowed_Pnk, -torch.inf)
    return _Batch(queries_Pn, keys_Pk, mask_Pnk[:, None])
