"""A grid: named dimensions over consecutive ranks, the first fastest. Arithmetic only, without process groups.

Each module of a model has its own grid. Two modules on the same ranks share no dimension: rank 3 may be (tp 1, dp 1)
of the encoder and (tp 1, cp 1, dp 0) of the language model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from workbench.errors import ShardingError

NAMES = ("tp", "cp", "pp", "dp")
"""Known dimensions, in the usual order of trainers: tp fastest, dp slowest."""


@dataclass(frozen=True, repr=False)
class Grid:
    """Named dimensions over ranks ``offset``, ``offset + 1``, ...

    Attributes:
        names: of the dimensions, the fastest first; tp and dp among them.
        sizes: ranks along each.
        offset: the first rank.

    Formula: rank = offset + sum_i x_i prod_{j < i} n_j.
    Raises:  ShardingError: dimensions that are missing, unknown, named twice or empty; a negative offset; pp > 1.

    Example:
        >>> Grid.of(tp=2, cp=2, dp=2).coordinates(6)
        {'tp': 0, 'cp': 1, 'dp': 1}
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, *, tp: int = 1, cp: int = 1, pp: int = 1, dp: int = 1, offset: int = 0) -> Grid:
        """Create a grid in the order of `NAMES`; pp > 1 raises an error."""
        names = ("tp", "cp", "dp") if pp == 1 else NAMES
        sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp}
        return cls(names, tuple(sizes[name] for name in names), offset)

    def __post_init__(self) -> None:
        """Validate names, sizes and offset."""
        requested = f"grid of {', '.join(self.names)} = {', '.join(map(str, self.sizes))} from rank {self.offset}"
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ShardingError(
                requested,
                found=f"{len(self.names)} names, {len(set(self.names))} of them different, and {len(self.sizes)} sizes",
                rule="a size for each dimension, each named once",
                fix="correct names or sizes",
            )
        if unknown := [name for name in self.names if name not in NAMES]:
            raise ShardingError(
                requested,
                found=f"dimension {', '.join(unknown)}",
                rule=f"dimensions are of {', '.join(NAMES)}",
                fix="fold other dimensions into dp",
            )
        if missing := [name for name in ("tp", "dp") if name not in self.names]:
            raise ShardingError(
                requested,
                found=f"no {' and no '.join(missing)}",
                rule="tp and dp are in every grid",
                fix="name them with size 1",
            )
        if min(self.sizes) < 1 or self.offset < 0:
            raise ShardingError(requested, rule="every size is at least 1, and no rank is negative", fix="correct it")
        if self["pp"] > 1:
            raise ShardingError(
                requested,
                found=f"pp={self['pp']}",
                rule="a module that shares its ranks with another has all its layers on every rank",
                fix="fold pipeline ranks into dp, cp or tp",
            )

    def __getitem__(self, name: str) -> int:
        """Number of ranks along a dimension; 1 if the grid does not have it."""
        return self.sizes[self.names.index(name)] if name in self.names else 1

    def __repr__(self) -> str:
        """The sizes, the fastest first, and the offset."""
        begin = f" from rank {self.offset}" if self.offset else ""
        return f"Grid({' x '.join(f'{name}={size}' for name, size in zip(self.names, self.sizes, strict=True))}{begin})"

    @property
    def label(self) -> str:
        """The dimensions of more than one rank; "1 rank" if there is none."""
        long = [f"{name}{size}" for name, size in zip(self.names, self.sizes, strict=True) if size > 1]
        return " x ".join(long) or "1 rank"

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.sizes)

    @property
    def ranks(self) -> range:
        """The ranks of the job in this grid."""
        return range(self.offset, self.offset + self.size)

    @property
    def strides(self) -> dict[str, int]:
        """Rank distance between neighbours along each dimension."""
        steps = [1, *itertools.accumulate(self.sizes, lambda step, size: step * size)]
        return dict(zip(self.names, steps, strict=False))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, dimension -> coordinate.

        Raises:
            ShardingError: it is not in the grid.
        """
        if rank not in self.ranks:
            raise ShardingError(
                f"coordinates of rank {rank} in {self}",
                found=f"ranks {self.offset} to {self.offset + self.size - 1}",
                rule="only ranks of the grid have coordinates",
                fix="call it on ranks of the grid",
            )
        return {name: (rank - self.offset) // step % self[name] for name, step in self.strides.items()}

    def rank_at(self, **coordinates: int) -> int:
        """The rank at some coordinates; 0 along dimensions that are not named.

        Raises:
            ShardingError: a coordinate outside of the grid.
        """
        if wrong := {name: at for name, at in coordinates.items() if not 0 <= at < self[name]}:
            raise ShardingError(
                f"rank of {self} at {wrong}",
                rule="a coordinate is below its dimension's size",
                fix="correct the coordinate",
            )
        return self.offset + sum(step * coordinates.get(name, 0) for name, step in self.strides.items())

    def place(self, rank: int) -> tuple[int, int, int]:
        """(dp, cp, tp) of a rank."""
        at = self.coordinates(rank)
        return at["dp"], at.get("cp", 0), at["tp"]

    def lines(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ along some dimensions only, in ascending order, each rank in one.

        Raises:
            ShardingError: a dimension that the grid does not have.

        Example:
            >>> Grid.of(tp=2, cp=2, dp=2).lines("cp")
            ((0, 2), (1, 3), (4, 6), (5, 7))
            >>> Grid.of(tp=2, cp=2, dp=2).lines("dp", "cp")
            ((0, 2, 4, 6), (1, 3, 5, 7))
        """
        if unknown := [name for name in names if name not in NAMES]:
            raise ShardingError(
                f"lines of {self} along {', '.join(unknown)}", rule=f"of {', '.join(NAMES)}", fix="name its dimensions"
            )
        fixed = [name for name in reversed(self.names) if name not in names]
        free = [name for name in reversed(self.names) if name in names]
        return tuple(
            tuple(sorted(self.rank_at(**at, **along) for along in self._places(free))) for at in self._places(fixed)
        )

    def _places(self, names: list[str]) -> Iterator[dict[str, int]]:
        for at in itertools.product(*(range(self[name]) for name in names)):
            yield dict(zip(names, at, strict=True))
