"""FlexAttention of torch over a block: any order of tokens, any window, compiled for a GPU, no scores in memory.

The mask is computed inside the kernel from positions and documents; fully masked tiles are skipped, and fully visible
tiles take no mask. FlexAttention has its own backward, relative to the log-normaliser of the block alone, so backward
here recomputes the block and passes gradients that correct for the difference.

Letters: q queries | k keys | m tiles of queries | n tiles of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from workbench.sharding.attention.shard import Block

TILE = 128
"""Queries, and keys, per tile."""
MOST_GRAPHS = 64
"""Recompile limit of torch: with and without a window and a gradient, and for lengths that happen to be equal."""

Attend = Callable[[Tensor, Tensor, Tensor, Block, float], tuple[Tensor, Tensor]]
"""(query, key, value, block, scale) -> (out, lse), both with a gradient."""


class FlexKernel:
    """FlexAttention, compiled for the lengths of the first call, and then once more for all others.

    Formula:  with lse_b and o_b of the block, lse and o of all keys, c = exp(lse_b - lse) and d_o' = c d_o, its own
              backward returns gradients of the whole softmax if it is passed d_o' and
              d_lse' = rowsum(d_o' o_b) - c rowsum(d_o o), for then
              ds = p_b (d_o' v^T - rowsum(d_o' o_b) + d_lse') = c p_b (d_o v^T - rowsum(d_o o)), and
              c p_b = exp(s - lse).
    Source:   arXiv 2412.05496; `torch.nn.attention.flex_attention`, torch 2.11 to 2.13.
    """

    name = "flex"
    least_scores = 2**28

    def __init__(self, attend: Attend | None = None) -> None:
        self.attend = attend or _attend

    def refusal(self, query: Tensor, key: Tensor, block: Block) -> str | None:
        """See `Kernel.refusal`."""
        if query.device.type != "cuda":
            return f"flex is compiled for a GPU, and queries are on {query.device.type}"
        if query.dtype not in (torch.bfloat16, torch.float16, torch.float32) or key.dtype != query.dtype:
            return f"flex computes in at most 32 bits, and queries are {str(query.dtype).removeprefix('torch.')}"
        if torch.cuda.get_device_capability(query.device) < (8, 0):
            return "flex needs a GPU of compute capability 8.0"
        if query.shape[-1] < 16:
            return f"flex takes head dimensions of at least 16, not {query.shape[-1]}"
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`. Output of the query's dtype, log-normalisers in float32."""
        with torch.no_grad():
            return self.attend(query, key, value, block, scale)

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
        """See `Kernel.backward`. Costs an additional forward; gradients of the query's dtype."""
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        with torch.enable_grad():
            out_b, lse_b = self.attend(query, key, value, block, scale)
        weight = (lse_b.detach() - lse).exp().masked_fill(lse_b.detach() == -torch.inf, 0)
        d_out_b = (weight[..., None] * d_out).to(out_b.dtype)
        d_lse_b = _rowsum(d_out_b, out_b.detach()) - weight * _rowsum(d_out, out)
        gradients = d_out_b, d_lse_b.to(lse_b.dtype)
        d_query, d_key, d_value = torch.autograd.grad((out_b, lse_b), (query, key, value), gradients)
        return d_query, d_key, d_value


def tiles(block: Block) -> tuple[Tensor, Tensor]:
    """[m, n] bool each: tiles that may be partly visible, and fully visible tiles. On the host; builds no token mask.

    Conservative: a fully masked tile may be marked as partly visible (the kernel masks it). A tile is never marked
    fully visible, or empty, if it is not.
    """
    places_q, documents_q = _extremes(block.query_positions_q), _extremes(block.query_documents_q)
    places_k, documents_k = _extremes(block.key_positions_k), _extremes(block.key_documents_k)
    least_back_mn = places_q[0][:, None] - places_k[1]
    most_back_mn = places_q[1][:, None] - places_k[0]
    some_mn = (most_back_mn >= 0) & (documents_q[0][:, None] <= documents_k[1])
    some_mn &= documents_q[1][:, None] >= documents_k[0]
    whole_mn = (least_back_mn >= 0) & (documents_q[0] == documents_q[1])[:, None]
    whole_mn &= (documents_k[0] == documents_k[1]) & (documents_q[0][:, None] == documents_k[0])
    if block.window is not None:
        some_mn &= least_back_mn < block.window
        whole_mn &= most_back_mn < block.window
    return some_mn & ~whole_mn, whole_mn


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of every tile; the last one is padded with its own last value."""
    short = -len(values) % TILE
    tiled = torch.cat([values, values[-1:].expand(short)]).view(-1, TILE)
    return tiled.amin(1), tiled.amax(1)


def block_mask(block: Block, device: torch.device) -> BlockMask:
    """Return the `BlockMask` of a block."""
    some_mn, whole_mn = tiles(block)
    places_q, places_k, documents_q, documents_k = (
        tensor.to(device, torch.int32)
        for tensor in (block.query_positions_q, block.key_positions_k, block.query_documents_q, block.key_documents_k)
    )
    window = None if block.window is None else torch.tensor(block.window, dtype=torch.int32, device=device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        back = places_q[query] - places_k[key]
        seen = (documents_q[query] == documents_k[key]) & (back >= 0)
        return seen if window is None else seen & (back < window)

    return BlockMask.from_kv_blocks(
        *_listed(some_mn, device), *_listed(whole_mn, device), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=block.shape
    )


def _listed(tiles_mn: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, 1, m] number of key tiles per query tile, and [1, 1, m, n] their indices, padded with the other tiles."""
    counts_m = tiles_mn.sum(1, dtype=torch.int32)
    indices_mn = tiles_mn.int().argsort(dim=1, descending=True, stable=True).int()
    return counts_m[None, None].to(device), indices_mn[None, None].to(device)


def _attend(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    mask = block.once(("flex", query.device), lambda: block_mask(block, query.device))
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        out, auxiliary = _compiled()(
            query,
            key,
            value,
            block_mask=mask,
            scale=scale,
            enable_gqa=key.shape[1] < query.shape[1],
            return_aux=AuxRequest(lse=True),
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )
    return out, auxiliary.lse


@cache
def _compiled() -> Any:
    # fullgraph: exceeding the recompile limit is an error, not a silent eager call with all scores in memory.
    return torch.compile(flex_attention, fullgraph=True)


def _rowsum(one: Tensor, other: Tensor) -> Tensor:
    return (one.to(torch.promote_types(one.dtype, torch.float32)) * other).sum(-1)
