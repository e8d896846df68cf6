"""Attention in a few lines of torch: any device, any dtype, any mask. The reference for the other kernels.

Query heads that share a key head become additional rows of one GEMM: nothing is repeated, and the gradient of a key
head is summed in the GEMM. Scores are computed for some queries at a time, so their memory does not grow with the row.

Letters: q queries | k keys | d head dimension | h key heads | g query heads that share a key head | n = g * q rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from workbench.sharding.attention.shard import Block

_SCORES = {"cpu": 2**18, "cuda": 2**27}
"""Maximum number of scores in memory, over all heads; on a CPU as many as fit in its cache."""


class PlainKernel:
    """Explicit mask and softmax. Computes in float32, or in float64 for float64 inputs."""

    name = "plain"
    least_scores = 0

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """None: it supports every block."""
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`. Output in the compute dtype, log-normalisers in float64."""
        key_hkd, value_hkd = _in_compute_dtype(key[0]), _in_compute_dtype(value[0])
        query_hgqd = _grouped(query, key_hkd)
        outs, lses = [], []
        for queries, mask_nk in _pieces(query_hgqd, block):
            scores_hnk = torch.baddbmm(mask_nk, _rows(query_hgqd, queries), key_hkd.mT, alpha=scale)
            p_hnk = torch.softmax(scores_hnk, -1)
            lse_hn = scores_hnk.amax(-1).double() - p_hnk.amax(-1).double().log()
            if not block.every_query_sees:
                fully_masked_n = _fully_masked(block, queries, query_hgqd)
                p_hnk.masked_fill_(fully_masked_n[:, None], 0)
                lse_hn.masked_fill_(fully_masked_n, -torch.inf)
            outs.append((p_hnk @ value_hkd).unflatten(1, (query_hgqd.shape[1], -1)))
            lses.append(lse_hn.unflatten(1, (query_hgqd.shape[1], -1)))
        return _concatenated(outs), _concatenated(lses)

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
        key_hkd, value_hkd = _in_compute_dtype(key[0]), _in_compute_dtype(value[0])
        query_hgqd, d_out_hgqd = _grouped(query, key_hkd), _grouped(d_out, key_hkd)
        delta = (_in_compute_dtype(d_out) * out).sum(-1) if delta is None else delta
        delta_hgq1, lse_hgq1 = (_grouped(x[..., None], key_hkd) for x in (delta, lse))
        d_queries, d_keys, d_values = [], [], []
        for queries, mask_nk in _pieces(query_hgqd, block):
            rows_hnd, d_rows_hnd = _rows(query_hgqd, queries), _rows(d_out_hgqd, queries)
            lse_hn1 = _rows(lse_hgq1, queries)
            if not block.every_query_sees:
                lse_hn1 = lse_hn1.masked_fill(_fully_masked(block, queries, query_hgqd)[:, None], 0)
            p_hnk = torch.baddbmm(mask_nk, rows_hnd, key_hkd.mT, alpha=scale).sub_(lse_hn1).exp_()
            d_values.append(p_hnk.mT @ d_rows_hnd)
            d_scores_hnk = torch.baddbmm(_rows(delta_hgq1, queries), d_rows_hnd, value_hkd.mT, beta=-1).mul_(p_hnk)
            d_queries.append(_scaled_gemm(d_scores_hnk, key_hkd, scale).unflatten(1, (query_hgqd.shape[1], -1)))
            d_keys.append(_scaled_gemm(d_scores_hnk.mT, rows_hnd, scale))
        return _concatenated(d_queries), _summed(d_keys), _summed(d_values)


def _in_compute_dtype(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _grouped(rows: Tensor, key_hkd: Tensor) -> Tensor:
    """[1, h * g, q, d] -> [h, g, q, d]."""
    return _in_compute_dtype(rows[0]).unflatten(0, (key_hkd.shape[0], -1))


def _rows(values_hgqd: Tensor, queries: slice) -> Tensor:
    """[h, g, q, d] of some queries -> [h, n, d]."""
    return values_hgqd[:, :, queries].flatten(1, 2)


def _pieces(query_hgqd: Tensor, block: Block) -> Iterator[tuple[slice, Tensor]]:
    """Split queries so that the scores of each part fit in memory, with its additive mask [n, k]: 0 or -inf."""
    device, dtype, group = query_hgqd.device, query_hgqd.dtype, query_hgqd.shape[1]
    queries, keys = block.shape
    step = max(1, _SCORES.get(device.type, _SCORES["cuda"]) // max(1, query_hgqd.shape[0] * group * keys))

    def mask_of(part: slice) -> Tensor:
        mask_qk = torch.zeros((), dtype=dtype, device=device).where(block.allowed_on(device, part), -torch.inf)
        return mask_qk.repeat(group, 1)

    if queries <= step:  # a small mask is cached for the other layers
        yield slice(0, queries), block.once(("plain mask", device, dtype, group), lambda: mask_of(slice(0, queries)))
        return
    for begin in range(0, queries, step):
        part = slice(begin, min(begin + step, queries))
        yield part, mask_of(part)


def _fully_masked(block: Block, queries: slice, query_hgqd: Tensor) -> Tensor:
    """[n] bool, the row sees no key."""
    return ~block.sees_q[queries].to(query_hgqd.device).repeat(query_hgqd.shape[1])


def _scaled_gemm(left_hnk: Tensor, right_hkd: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(left_hnk.new_zeros(()), left_hnk, right_hkd, beta=0, alpha=scale)


def _concatenated(pieces: list[Tensor]) -> Tensor:
    """[h, g, some q, ...] of all parts of the queries -> [1, h * g, q, ...]."""
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)).flatten(0, 1)[None]


def _summed(pieces: list[Tensor]) -> Tensor:
    return functools.reduce(Tensor.add_, pieces)[None]
