"""Who holds which tokens on one side of a bridge: shares, each of some ranks that hold the same.

Tokens (rows of an activation) have numbers that all ranks know. A rank's share is a list of them, in the order of its
rows; `PADDING` is a row without a token. Ranks of one share are replicas: they compute the same from the same, so that
at a source each needs the whole gradient, and at a destination each brings the same gradient, which counts once.

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
    """What some ranks hold alike.

    Attributes:
        ranks: numbers within the axis of the bridge, ascending.
        tokens_t: [t] long, on the host.
        answers_t: [t] bool; at a destination, the rows of which a gradient may come from here. None: all.
    """

    ranks: tuple[int, ...]
    tokens_t: Tensor
    answers_t: Tensor | None = None

    @property
    def answered_t(self) -> Tensor:
        """[t] bool: rows that are a token and answer for it."""
        real_t = self.tokens_t != PADDING
        return real_t if self.answers_t is None else real_t & self.answers_t


@dataclass(frozen=True, eq=False)
class Side:
    """The shares of all ranks.

    Attributes:
        shares: each rank is in exactly one.

    Raises:
        ShardingError: a rank in no share, or in two.
    """

    shares: tuple[Share, ...]

    def __post_init__(self) -> None:
        """Refuse ranks that are lost or counted twice."""
        everyone = sorted(rank for share in self.shares for rank in share.ranks)
        if everyone != list(range(len(everyone))) or not everyone:
            raise ShardingError(
                f"one side of a bridge: {len(self.shares)} shares",
                found=f"ranks {everyone[:16]}",
                rule="every rank from 0 on is in exactly one share",
                fix="give a rank that holds nothing a share without tokens",
            )

    @cached_property
    def size(self) -> int:
        """Ranks in all."""
        return sum(len(share.ranks) for share in self.shares)

    @cached_property
    def number_of(self) -> tuple[int, ...]:
        """The number of the share of each rank."""
        numbers = {rank: number for number, share in enumerate(self.shares) for rank in share.ranks}
        return tuple(numbers[rank] for rank in range(self.size))

    @cached_property
    def share_of(self) -> tuple[Share, ...]:
        """The share of each rank."""
        return tuple(self.shares[number] for number in self.number_of)


def sharded(grid: Grid, tokens_of: Callable[[int, int, int], Tensor], *, over_tp: bool = False) -> Side:
    """Tokens dealt over dp and cp; tp ranks are replicas, or tokens are dealt over them too.

    Args:
        grid: the layout.
        tokens_of: (dp, cp, tp) to the tokens of that place; tp is 0 where its ranks are replicas.
        over_tp: tp ranks hold different tokens (sequence parallelism).
    """
    shares = []
    for dp, cp in itertools.product(range(grid["dp"]), range(grid["cp"])):
        ranks = _ranks(grid, dp, cp)
        shares += (
            [Share((rank,), tokens_of(dp, cp, tp)) for tp, rank in enumerate(ranks)]
            if over_tp
            else [Share(ranks, tokens_of(dp, cp, 0))]
        )
    return Side(tuple(shares))


def whole(
    grid: Grid, tokens_of: Callable[[int], Tensor], answers_of: Callable[[int, int], Tensor] | None = None
) -> Side:
    """Tokens dealt over dp; every cp rank gets all of its dp rank's and uses them differently.

    Args:
        grid: the layout of a destination.
        tokens_of: dp to the tokens of that place.
        answers_of: (dp, cp) to the rows whose gradient may be anything but zero on that cp rank; None: all.
    """
    return Side(
        tuple(
            Share(_ranks(grid, dp, cp), tokens_of(dp), answers_of(dp, cp) if answers_of else None)
            for dp, cp in itertools.product(range(grid["dp"]), range(grid["cp"]))
        )
    )


def declare(tokens_t: Tensor, axis: Axis, *, alike: int) -> Side:
    """A side of which each rank knows its own rows. Collective over the axis; any rank may hold none.

    Args:
        tokens_t: [t] numbers of the tokens that this rank holds.
        axis: all ranks of the bridge.
        alike: the same number on replicas, and on no other rank.

    Raises:
        ShardingError: ranks that say they are alike, and hold different tokens.
    """
    mine = tokens_t.detach().long()
    held = [one.cpu() for one in all_gather(mine, axis)]
    labels = torch.cat(all_gather(mine.new_tensor([alike]), axis)).tolist()
    shares: dict[int, list[int]] = {}
    for rank, label in enumerate(labels):
        first = shares.setdefault(label, [])
        if first and not torch.equal(held[first[0]], held[rank]):
            raise ShardingError(
                f"ranks {first[0]} and {rank} as replicas (alike = {label})",
                found=f"{len(held[first[0]])} and {len(held[rank])} rows, not of the same tokens",
                rule="replicas hold the same tokens in the same order",
                fix="give ranks that hold different tokens different numbers",
            )
        first.append(rank)
    return Side(tuple(Share(tuple(ranks), held[ranks[0]]) for ranks in shares.values()))


def blocks(total: int, parts: int) -> list[tuple[int, int]]:
    """(begin, end) of so many things in order over so many parts, as evenly as they go; the first parts get more.

    Example:
        >>> blocks(5, 3)
        [(0, 2), (2, 4), (4, 5)]
    """
    edges = [part * (total // parts) + min(part, total % parts) for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def stacked(counts: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of stretches of given lengths, one after another."""
    edges = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return list(itertools.pairwise(edges))


def numbers(samples: tuple[int, int], tokens: int, positions_t: Tensor) -> Tensor:
    """Numbers of some positions of samples [begin, end), sample after sample; sample b has b * tokens and on."""
    return (torch.arange(*samples)[:, None] * tokens + positions_t).flatten()


def _ranks(grid: Grid, dp: int, cp: int) -> tuple[int, ...]:
    """Numbers within the grid of the tp ranks at a place."""
    return tuple(grid.rank_at(dp=dp, cp=cp, tp=tp) - grid.offset for tp in range(grid["tp"]))
