"""Token assignment on one side of a bridge: shares of tokens, each of the ranks that hold the same ones.

Tokens (rows of an activation) have numbers that all ranks know; `PADDING` is a row without a token. Ranks of one share
are replicas: they compute the same from the same inputs, so at a source each needs the whole gradient, and at a
destination each has the same gradient, which counts once.

Letters: t rows of a rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.rollouts.batch import PADDING
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.collectives import all_gather
from workbench.sharding.mesh import Axis


@dataclass(frozen=True, eq=False)
class Share:
    """The tokens that some ranks, replicas of each other, hold.

    Attributes:
        ranks: indices within the axis of the bridge, ascending.
        tokens_t: [t] long, on the host, in the order of the rows.
        returns_gradient_t: [t] bool; at a destination, rows whose gradient may be nonzero here. None: all.
    """

    ranks: tuple[int, ...]
    tokens_t: Tensor
    returns_gradient_t: Tensor | None = None

    @property
    def gradient_rows_t(self) -> Tensor:
        """[t] bool: rows with a token whose gradient this share returns."""
        real_t = self.tokens_t != PADDING
        return real_t if self.returns_gradient_t is None else real_t & self.returns_gradient_t


@dataclass(frozen=True, eq=False)
class Side:
    """The shares of all ranks; a rank in none, or in two, raises an error."""

    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        all_ranks = sorted(rank for share in self.shares for rank in share.ranks)
        if all_ranks != list(range(len(all_ranks))) or not all_ranks:
            raise ShardingError(
                f"one side of a bridge: {len(self.shares)} shares",
                found=f"ranks {all_ranks[:16]}",
                rule="every rank from 0 on is in exactly one share",
                fix="give a rank that holds nothing a share without tokens",
            )

    @cached_property
    def size(self) -> int:
        """Total number of ranks."""
        return sum(len(share.ranks) for share in self.shares)

    @cached_property
    def number_of(self) -> tuple[int, ...]:
        """Index of each rank's share."""
        numbers = {rank: number for number, share in enumerate(self.shares) for rank in share.ranks}
        return tuple(numbers[rank] for rank in range(self.size))

    @cached_property
    def share_of(self) -> tuple[Share, ...]:
        """The share of each rank."""
        return tuple(self.shares[number] for number in self.number_of)


def sharded(grid: Grid, tokens_of: Callable[[int, int, int], Tensor], *, over_tp: bool = False) -> Side:
    """Build a side with tokens sharded over dp and cp; tp ranks are replicas, or tokens are sharded over them too.

    ``tokens_of`` returns the tokens at (dp, cp, tp); tp is 0 if its ranks are replicas.
    """
    shares = []
    for dp, cp in itertools.product(range(grid["dp"]), range(grid["cp"])):
        ranks = _ranks(grid, dp, cp)
        together = [(rank,) for rank in ranks] if over_tp else [ranks]
        shares += [Share(replicas, tokens_of(dp, cp, tp)) for tp, replicas in enumerate(together)]
    return Side(tuple(shares))


def whole(
    grid: Grid, tokens_of: Callable[[int], Tensor], gradient_rows_of: Callable[[int, int], Tensor] | None = None
) -> Side:
    """Build a destination with tokens sharded over dp; each cp rank holds all of its dp rank's, used differently.

    ``tokens_of`` returns the tokens at dp, ``gradient_rows_of`` the rows whose gradient may be nonzero at (dp, cp).
    """
    return Side(
        tuple(
            Share(_ranks(grid, dp, cp), tokens_of(dp), gradient_rows_of(dp, cp) if gradient_rows_of else None)
            for dp, cp in itertools.product(range(grid["dp"]), range(grid["cp"]))
        )
    )


def declare(tokens_t: Tensor, axis: Axis, *, replica_id: int) -> Side:
    """Build a side from the numbers of each rank's own tokens, [t]. Collective over all ranks of the bridge.

    ``replica_id`` is the same number on replicas, and on no other rank.

    Raises:
        ShardingError: declared replicas that hold different tokens.
    """
    local_t = tokens_t.detach().long()
    tokens_of = [one.cpu() for one in all_gather(local_t, axis)]
    labels = torch.cat(all_gather(local_t.new_tensor([replica_id]), axis)).tolist()
    shares: dict[int, list[int]] = {}
    for rank, label in enumerate(labels):
        first = shares.setdefault(label, [])
        if first and not torch.equal(tokens_of[first[0]], tokens_of[rank]):
            raise ShardingError(
                f"ranks {first[0]} and {rank} as replicas (alike = {label})",
                found=f"{len(tokens_of[first[0]])} and {len(tokens_of[rank])} rows, not of the same tokens",
                rule="replicas hold the same tokens in the same order",
                fix="give ranks that hold different tokens different numbers",
            )
        first.append(rank)
    return Side(tuple(Share(tuple(ranks), tokens_of[ranks[0]]) for ranks in shares.values()))


def blocks(total: int, parts: int) -> list[tuple[int, int]]:
    """(begin, end) of each of ``parts`` parts of ``total`` items, as even as possible; the first parts are larger.

    Example:
        >>> blocks(5, 3)
        [(0, 2), (2, 4), (4, 5)]
    """
    edges = [part * (total // parts) + min(part, total % parts) for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def stacked(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of consecutive ranges of given lengths."""
    return list(itertools.pairwise(itertools.accumulate(counts, initial=0)))


def numbers(samples: tuple[int, int], tokens: int, positions_t: Tensor) -> Tensor:
    """Token numbers of some positions of samples [begin, end); sample b starts at b * tokens."""
    return (torch.arange(*samples)[:, None] * tokens + positions_t).flatten()


def _ranks(grid: Grid, dp: int, cp: int) -> tuple[int, ...]:
    """Indices within the grid of the tp ranks at (dp, cp)."""
    return tuple(grid.rank_at(dp=dp, cp=cp, tp=tp) - grid.offset for tp in range(grid["tp"]))
