"""A row as canonical blocks: which of them a rank holds, and which keys each of them looks at.

Letters: T packed tokens | t tokens of a rank | B blocks of the row | H key heads | d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.attention import AttentionShard
from workbench.sharding.attention.block import Block
from workbench.sharding.collectives import gather_equal, scatter_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class Span:
    """One block of queries, and the stretch of the row that holds all of its keys.

    Attributes:
        queries: rows of this rank's tokens.
        keys: places in the row.
        seen: who sees whom among the two.
    """

    queries: slice
    keys: slice
    seen: Block


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """The blocks of a row, dealt to the ranks of the cp axis.

    Attributes:
        axis: the cp axis.
        block: tokens of a block.
        owned_B: numbers of the blocks in the order in which the ranks hold them, rank after rank.
        documents_T: number of the document at each place.
        real_T: whether a place holds a token of a document.
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
            ShardingError: an order that does not move whole blocks, or ranks that exchange anything but keys and
                values gathered.
        """
        places_RT, axis = shard.positions_GUt.flatten(1), shard.outer
        if shard.inner.size > 1 or (axis.size > 1 and shard.algorithm != "gathered"):
            raise ShardingError(
                f"exact attention with attention {shard.algorithm!r}",
                rule="a block of queries meets all of its keys at once",
                fix="use attention gathered",
            )
        whole = places_RT.shape[1] % block == 0
        places_Bb = places_RT.reshape(-1, block) if whole else places_RT[:, :1]
        owned_B = places_Bb[:, 0] // block
        if not whole or not torch.equal(places_Bb, owned_B[:, None] * block + torch.arange(block)):
            raise ShardingError(
                f"blocks of {block} tokens in shards of {places_RT.shape[1]}",
                found=f"rank 0 holds places {places_RT[0, :6].tolist()} ...",
                rule="an order moves whole blocks of a row: contiguous, zigzag, or balanced by blocks "
                "that these divide",
                fix="choose such an order, smaller blocks, or rows that are "
                "a multiple of block_tokens * cp (zigzag: 2 cp)",
            )
        real_T = torch.ones_like(shard.documents_T, dtype=torch.bool) if shard.real_T is None else shard.real_T
        return cls(axis, block, owned_B, shard.documents_T, real_T)

    @property
    def own_B(self) -> Tensor:
        """The blocks of this rank, in its order."""
        return self.owned_B.view(self.axis.size, -1)[self.axis.rank]

    @property
    def leaves(self) -> tuple[int, int]:
        """Tokens of documents that this rank holds, and blocks with any."""
        real_Bb = self.real_T.view(-1, self.block)[self.own_B]
        return int(real_Bb.sum()), int(real_Bb.any(1).sum())

    def spans(self, window: int | None) -> list[Span]:
        """Each block of this rank with its keys: from the beginning of its first token's document, or window."""
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
        """Everybody's values in the order of the row, outside autograd. [t, ...] -> [T, ...]."""
        return self._moved(gather_equal(values_t, self.axis).flatten(0, 1), to_row=True)

    def scatter_sum(self, values_T: Tensor) -> Tensor:
        """Sum over ranks of integers in the order of the row; each keeps its own. [T, ...] -> [t, ...]."""
        return scatter_sum(self._moved(values_T, to_row=False).unflatten(0, (self.axis.size, -1)), self.axis)

    def _moved(self, values_T: Tensor, *, to_row: bool) -> Tensor:
        key = to_row, values_T.device
        if key not in self._moves:  # once a row: what comes from the host waits for all that the device has to do
            order_B = self.owned_B.argsort() if to_row else self.owned_B
            still = torch.equal(order_B, torch.arange(len(order_B)))
            self._moves[key] = None if still else order_B.to(values_T.device)
        order_B = self._moves[key]
        return values_T if order_B is None else values_T.unflatten(0, (-1, self.block))[order_B].flatten(0, 1)
