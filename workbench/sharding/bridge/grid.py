"""Grids: named dimensions over consecutive ranks, the first fastest; and pairs. Arithmetic only, no process groups.

Each module of a model has its own grid. Two modules on the same ranks share no dimension: rank 3 may be (tp 1, dp 1)
of the encoder and (tp 1, cp 1, dp 0) of the language model. With k = max(dp_s, dp_d) / min(dp_s, dp_d), s the source
and d the destination, the path of a bridge between two grids is

    fan-in   dp_s = k dp_d   k ranks of the source hold the samples of one rank of the destination: all-gather
    fan-out  dp_d = k dp_s   a rank of the destination takes one of k slots of its source rank's samples: narrow
    equal    dp_s = dp_d     each rank already holds its samples
    general  otherwise       `workbench.sharding.bridge.crossing`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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


Lines = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GridPair:
    """The layouts of the module whose activations cross a bridge, and of the module that reads them.

    Raises:
        ShardingError: different ranks on the two sides (I1); samples that would move between ranks only because of the
            order of the dimensions (I5).
    """

    source: Grid
    destination: Grid

    def __post_init__(self) -> None:
        source, destination = self.source, self.destination
        requested = f"bridge from {source} to {destination}"
        if source.ranks != destination.ranks:
            spans = " and ".join(f"{grid.ranks.start} to {grid.ranks.stop - 1}" for grid in (source, destination))
            raise ShardingError(
                f"{requested}: same ranks (I1)",
                found=f"ranks {spans}",
                rule="both grids have one size and one offset",
                fix="choose sizes with the same product",
            )
        if wrong := self._not_nested():
            raise ShardingError(
                f"{requested}: nesting (I5)",
                found=wrong,
                rule="each dp slot of the side with more lies inside one of the other side",
                fix="let dp be the slowest dimension of both grids: tp, cp, dp",
            )

    def __repr__(self) -> str:
        return f"GridPair({self.source.label} -> {self.destination.label}: {self.path})"

    @property
    def ratio(self) -> int:
        """k: dp ranks of the larger side for each of the smaller side; 0 if not an integer."""
        most, least = (f(self.source["dp"], self.destination["dp"]) for f in (max, min))
        return 0 if most % least else most // least

    @property
    def why_general(self) -> str:
        """The condition of the fast path that the grids violate; "" if none."""
        if self.source["cp"] > 1:
            return f"I3: the source shards its sequence, cp={self.source['cp']}"
        if not self.ratio:
            return f"I4: dp={self.source['dp']} and dp={self.destination['dp']} do not divide"
        return ""

    @property
    def path(self) -> str:
        """fan-in, fan-out, equal or general."""
        if self.why_general:
            return "general"
        source, destination = self.source["dp"], self.destination["dp"]
        return "equal" if source == destination else "fan-in" if source > destination else "fan-out"

    @cached_property
    def gather_lines(self) -> Lines:
        """The groups that gather along the batch, forward in a fan-in, backward in a fan-out; () otherwise.

        Formula: fan-in   [rank_s(dp i k + j, tp t) : j < k] for i < dp_d, t < tp_s;
                 fan-out  [rank_d(dp i k + j, tp t, cp c) : j < k] for i < dp_s, t < tp_d, c < cp_d.

        Example:
            >>> GridPair(Grid.of(tp=2, dp=4), Grid.of(tp=2, cp=2, dp=2)).gather_lines
            ((0, 2), (1, 3), (4, 6), (5, 7))
        """
        if self.path not in ("fan-in", "fan-out"):
            return ()
        grid, slots = (self.source if self.path == "fan-in" else self.destination), self.ratio
        lines = tuple(
            tuple(grid.rank_at(dp=outer * slots + slot, cp=cp, tp=tp) for slot in range(slots))
            for outer in range(grid["dp"] // slots)
            for cp in range(grid["cp"])
            for tp in range(grid["tp"])
        )
        all_ranks = sorted(rank for line in lines for rank in line)
        assert all_ranks == list(grid.ranks), "every rank gathers in exactly one group (I7)"
        return lines

    def slot(self, rank: int) -> int:
        """Slot index of a rank, 0 to k - 1, on the side with more dp ranks."""
        side = self.source if self.path == "fan-in" else self.destination
        return side.place(rank)[0] % self.ratio

    def _not_nested(self) -> str:
        slots = self.ratio
        if not slots:
            return ""
        many, few = sorted((self.source, self.destination), key=lambda grid: -grid["dp"])
        for rank in many.ranks:
            inner, outer = many.place(rank)[0], few.place(rank)[0]
            if inner // slots != outer:
                return f"rank {rank} at dp={inner} of {many}, at dp={outer} of {few}, not {inner // slots}"
        return ""


def least_samples(pair: GridPair) -> int:
    """The fewest samples that divide evenly on both sides."""
    return math.lcm(pair.source["dp"], pair.destination["dp"])
