"""Two grids over the same ranks: the invariants between them, and the path of the bridge.

With k = max(dp_s, dp_d) / min(dp_s, dp_d), s the source and d the destination:

    fan-in   dp_s = k dp_d   k ranks of the source hold the samples of one rank of the destination: all-gather
    fan-out  dp_d = k dp_s   a rank of the destination takes one of k slots of its source rank's samples: narrow
    equal    dp_s = dp_d     each rank already holds its samples
    general  otherwise       `workbench.sharding.bridge.crossing`
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from workbench.errors import ShardingError
from workbench.sharding.bridge.grid import Grid

Lines = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GridPair:
    """The layouts of a bridge's two modules.

    Attributes:
        source: of the module whose activations cross.
        destination: of the module that reads them.

    Raises:
        ShardingError: different ranks on the two sides; samples that would move between ranks only because of the
            order of the dimensions.
    """

    source: Grid
    destination: Grid

    def __post_init__(self) -> None:
        """Check for the same ranks (I1) and nested dp slots (I5)."""
        source, destination = self.source, self.destination
        requested = f"bridge from {source} to {destination}"
        if source.size != destination.size or source.offset != destination.offset:
            raise ShardingError(
                f"{requested}: same ranks (I1)",
                found=f"ranks {_span(source)} and {_span(destination)}",
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
        """The layouts and the path."""
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


def _span(grid: Grid) -> str:
    return f"{grid.ranks.start} to {grid.ranks.stop - 1}"
