"""Shard plans: which rank holds which token of a row, and the way back.

One permutation moves every tensor of a row, after everything that looks across tokens (shift, document ends,
weights) was computed on the whole row.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import ShardingError

ORDERS = ("contiguous", "zigzag")


def chunks_per_rank(order: str) -> int:
    """How many chunks of a row a rank holds: the row must divide by this times cp."""
    if order not in ORDERS:
        raise ShardingError(f"shard plan with order {order!r}", rule=f"one of {', '.join(ORDERS)}",
                            fix="correct layout.order")
    return 2 if order == "zigzag" else 1


def spans(positions: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of every stretch of consecutive positions; the end is not in it.

    Example:
        >>> spans([0, 1, 6, 7])
        [(0, 2), (6, 8)]
    """
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


@dataclass(frozen=True)
class ShardPlan:
    """A permutation of the tokens of a row, cut into equal shards.

    Attributes:
        order: its name.
        cp: ranks that share the row.
        permutation_T: [T] global positions in rank-major order: rank r owns
            ``permutation_T[r * T / cp : (r + 1) * T / cp]``, in the order it holds them.
        inverse_T: [T] where each global position went.

    Example:
        >>> plan = ShardPlan.make("zigzag", num_tokens=8, cp=2)
        >>> [plan.positions(rank).tolist() for rank in range(2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    order: str
    cp: int
    permutation_T: Tensor
    inverse_T: Tensor

    @classmethod
    def make(cls, order: str, *, num_tokens: int, cp: int) -> ShardPlan:
        """Plan a row of ``num_tokens`` for ``cp`` ranks.

        contiguous: rank r holds the r-th of cp equal pieces. zigzag: the row is cut into 2 * cp chunks and
        rank r holds chunks r and 2 * cp - 1 - r, so that all ranks do equal causal attention work.

        Raises:
            ShardingError: unknown order, or the row does not divide.
        Source:
            zigzag: Llama 3 report, arXiv 2407.21783, context parallelism.
        """
        pieces = chunks_per_rank(order) * cp
        if cp < 1 or num_tokens < 1 or num_tokens % pieces:
            need = f"2 * cp = {pieces}" if order == "zigzag" else f"cp = {pieces}"
            raise ShardingError(
                f"shard plan: {order} order of {num_tokens} tokens over cp={cp}",
                found=f"{num_tokens} tokens", rule=f"a positive multiple of {need}",
                fix=f"pad the row to {max(1, -(-num_tokens // max(1, pieces))) * max(1, pieces)} tokens "
                    "(pack(..., multiple_of=...); data.multiple_of unset does it)")
        chunk = torch.arange(num_tokens).view(pieces, -1)
        if order == "zigzag":
            owned = [torch.cat([chunk[rank], chunk[pieces - 1 - rank]]) for rank in range(cp)]
        else:
            owned = list(chunk)
        permutation = torch.cat(owned)
        return cls(order, cp, permutation, torch.argsort(permutation))

    def __repr__(self) -> str:
        """Say who holds which tokens."""
        shown = [f"rank {rank}: {self._held(rank)}" for rank in range(min(self.cp, 8))]
        more = [f"and {self.cp - 8} more"] if self.cp > 8 else []
        return f"ShardPlan({self.order}, {self.num_tokens} tokens over cp={self.cp}; {'; '.join([*shown, *more])})"

    def _held(self, rank: int) -> str:
        held = [f"{begin}-{end - 1}" for begin, end in spans(sorted(self.positions(rank).tolist()))]
        return ", ".join(held[:4] + ([f"and {len(held) - 4} more"] if len(held) > 4 else []))

    @property
    def num_tokens(self) -> int:
        """T, tokens of the unsplit row."""
        return self.permutation_T.shape[0]

    def positions(self, rank: int) -> Tensor:
        """[T / cp] global positions that a rank holds, in its own order."""
        return self.permutation_T.view(self.cp, -1)[rank]

    def split(self, values_T: Tensor, rank: int) -> Tensor:
        """A rank's share of a token-aligned tensor. [T, ...] -> [T / cp, ...]."""
        return values_T.index_select(0, self.positions(rank).to(values_T.device))

    def merge(self, rank_major_T: Tensor) -> Tensor:
        """Undo the plan: shards concatenated in rank order -> the row in its own order."""
        return rank_major_T.index_select(0, self.inverse_T.to(rank_major_T.device))
