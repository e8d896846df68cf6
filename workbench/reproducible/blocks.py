"""A row as canonical blocks: their distribution over ranks, and the keys that each block attends to.

Letters: T packed tokens | t tokens of a rank | B blocks of the row | H key heads | d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.attention import AttentionShard
from workbench.sharding.attention.shard import Block
from workbench.sharding.collectives import gather_equal, scatter_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class Span:
    """A block of queries (rows of this rank's tokens), the range of the row with all of its keys, and their mask."""

    queries: slice
    keys: slice
    seen: Block


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Blocks of a row, dealt to the ranks of the cp axis.

    Attributes:
        axis: the cp axis.
        block: tokens of a block.
        owned_B: indices of the blocks in the order in which the ranks hold them, rank after rank.
        documents_T: index of the document at each position.
        real_T: True if a position holds a token of a document.
    """

    axis: Axis
    block: int
    owned_B: Tensor
    documents_T: Tensor
    real_T: Tensor
    _spans: dict[int | None, list[Span]] = field(default_factory=dict, repr=False)
    _moves: dict[tuple[bool, torch.device], Tensor | None] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, shard: AttentionShard, block: int) -> RowBlocks:
        """Find the blocks of a row.

        Raises:
            ShardingError: an order that does not move whole blocks, or an attention algorithm other than gathered.
        """
        places_RT, axis = shard.positions_GUt.flatten(1), shard.outer
        if shard.inner.size > 1 or (axis.size > 1 and shard.algorithm != "gathered"):
            raise ShardingError(
                f"exact attention with attention {shard.algorithm!r}",
                rule="a block of queries needs all of its keys at once",
                fix="use attention gathered",
            )
        whole = places_RT.shape[1] % block == 0
        places_Bb = places_RT.reshape(-1, block) if whole else places_RT[:, :1]
        owned_B = places_Bb[:, 0] // block
        if not whole or not torch.equal(places_Bb, owned_B[:, None] * block + torch.arange(block)):
            raise ShardingError(
                f"blocks of {block} tokens in shards of {places_RT.shape[1]}",
                found=f"rank 0 holds places {places_RT[0, :6].tolist()} ...",
                rule="an order moves whole blocks of a row: contiguous, zigzag, or balanced by blocks that are "
                "multiples of these",
                fix="choose such an order, smaller blocks, or rows that are a multiple of block_tokens * cp "
                "(zigzag: 2 cp)",
            )
        real_T = torch.ones_like(shard.documents_T, dtype=torch.bool) if shard.real_T is None else shard.real_T
        return cls(axis, block, owned_B, shard.documents_T, real_T)

    @property
    def own_B(self) -> Tensor:
        """Indices of this rank's blocks, in its order."""
        return self.owned_B.view(self.axis.size, -1)[self.axis.rank]

    @property
    def leaves(self) -> tuple[int, int]:
        """Number of document tokens on this rank, and of blocks that contain any."""
        real_Bb = self.real_T.view(-1, self.block)[self.own_B]
        return int(real_Bb.sum()), int(real_Bb.any(1).sum())

    def spans(self, window: int | None) -> list[Span]:
        """Blocks of this rank with their keys, which begin at the first token's document, or at its window."""
        if window not in self._spans:
            self._spans[window] = [self._span(at, int(number), window) for at, number in enumerate(self.own_B)]
        return self._spans[window]

    def _span(self, at: int, number: int, window: int | None) -> Span:
        start, end = number * self.block, (number + 1) * self.block
        begin = int(torch.searchsorted(self.documents_T, self.documents_T[start]))
        if window is not None:
            begin = max(begin, start - window + 1)
        queries, keys = torch.arange(start, end), torch.arange(begin, end)
        seen = Block(queries, keys, self.documents_T[start:end], self.documents_T[begin:end], window)
        return Span(slice(at * self.block, (at + 1) * self.block), slice(begin, end), seen)

    def gather(self, values_t: Tensor) -> Tensor:
        """Gather values of all ranks in the order of the row, outside autograd. [t, ...] -> [T, ...]."""
        return self._moved(gather_equal(values_t, self.axis).flatten(0, 1), to_row=True)

    def scatter_sum(self, values_T: Tensor) -> Tensor:
        """Reduce-scatter integers that are in the order of the row. [T, ...] -> [t, ...]."""
        return scatter_sum(self._moved(values_T, to_row=False).unflatten(0, (self.axis.size, -1)), self.axis)

    def _moved(self, values_T: Tensor, *, to_row: bool) -> Tensor:
        key = to_row, values_T.device
        if key not in self._moves:  # once per row: a copy from the host synchronizes with the device
            order_B = self.owned_B.argsort() if to_row else self.owned_B
            is_identity = torch.equal(order_B, torch.arange(len(order_B)))
            self._moves[key] = None if is_identity else order_B.to(values_T.device)
        moves_B = self._moves[key]
        return values_T if moves_B is None else values_T.unflatten(0, (-1, self.block))[moves_B].flatten(0, 1)
