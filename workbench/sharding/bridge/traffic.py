"""Traffic across a bridge, rank by rank, computed without running ranks: for diagrams and byte counts.

Letters: R ranks, numbered within the grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.rollouts.batch import PADDING
from workbench.sharding.bridge.crossing import Crossing
from workbench.sharding.bridge.delivery import Delivery, Route, check_delivery, route_of, sides_of
from workbench.sharding.bridge.grid import GridPair, Lines, least_samples
from workbench.sharding.bridge.sides import Side

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, eq=False)
class Step:
    """One exchange: [R, R] rows from rank to rank; local rows are on the diagonal."""

    direction: Direction
    name: str
    rows_RR: Tensor

    @property
    def between(self) -> Tensor:
        """[R, R] rows sent between different ranks."""
        return self.rows_RR - torch.diag(self.rows_RR.diagonal())


@dataclass(frozen=True, eq=False)
class Traffic:
    """Communication of one activation across a bridge: ``tokens`` of a sequence, both sides, and all steps in order."""

    pair: GridPair
    delivery: Delivery
    route: Route
    tokens: int
    sides: tuple[Side, Side]
    steps: tuple[Step, ...]

    @classmethod
    def of(
        cls,
        pair: GridPair,
        delivery: Delivery | None = None,
        *,
        samples: Sequence[int] | None = None,
        tokens: int | None = None,
        general: bool = False,
    ) -> Traffic:
        """Count rows and exchanges, by default of whole sequences; errors are those of `connect` and `Bridge.cross`.

        Defaults are the fewest samples, of each dp rank of the source, that divide evenly on both sides, and the fewest
        tokens of a sequence that every order can split. ``general``: even if the fast path applies.
        """
        how = delivery or Delivery()
        check_delivery(pair, how)
        dp = pair.source["dp"]
        counts = [least_samples(pair) // dp] * dp if samples is None else list(samples)
        if tokens is None:
            runs = pair.destination["tp"] if how.sequence_parallel else 1
            tokens = 2 * pair.source["cp"] * pair.destination["cp"] * runs
        route, sides = route_of(pair, how, counts), sides_of(pair, how, counts, tokens)
        if general and not route.why:
            route = Route(route.samples, "general", "as requested")
        if route.path == "general":
            crossing = Crossing.make(*sides)
            steps: tuple[Step, ...] = (
                Step("forward", "exchange of rows", crossing.forward_RR),
                Step("backward", "exchange of gradients of distinct consumers", crossing.backward_RR),
            )
        else:
            steps = _of_fast_path(pair, how, counts[0] * tokens)
        return cls(pair, how, route, tokens, sides, steps)

    def received_bytes(self, direction: Direction, row_bytes: int) -> int:
        """Maximum bytes that a rank receives from others in one direction, for rows of ``row_bytes``."""
        rows = sum(step.between.sum(0) for step in self.steps if step.direction == direction)
        return int(torch.as_tensor(rows).max() * row_bytes)

    def __repr__(self) -> str:
        why = f" ({self.route.why})" if self.route.why else ""
        return (
            f"Traffic({self.pair.source.label} -> {self.pair.destination.label}: {self.route.path}{why}; "
            f"{sum(self.route.samples)} samples of {self.tokens} tokens)"
        )

    def drawing(self) -> str:
        """Text diagram: both sides rank by rank, and a table of rows for each exchange.

        Example:
            >>> from workbench.sharding.bridge.grid import Grid
            >>> print(Traffic.of(GridPair(Grid.of(tp=2, dp=1), Grid.of(dp=2))).drawing())
            rank  source           holds         destination      gets
               0  dp0 cp0 tp0      0, 1          dp0 cp0 tp0      0
               1  dp0 cp0 tp1      0, 1          dp1 cp0 tp0      1
            backward, all-gather along the batch: rows from (line) to (column)
                   0   1
               0       2
               1   2
        """
        columns = [("rank", 6), ("source", 17), ("holds", 14), ("destination", 17), ("gets", 0)]
        lines = ["".join(f"{name:<{width}}" for name, width in columns).rstrip()]
        for rank in range(self.pair.source.size):
            before, after = (
                coordinates_label(grid.place(rank + grid.offset)) for grid in (self.pair.source, self.pair.destination)
            )
            holds, gets = (self.tokens_label(side, rank) for side in self.sides)
            lines.append(f"{rank + self.pair.source.offset:>4}  {before:<17}{holds:<14}{after:<17}{gets}")
        for step in self.steps:
            if not step.between.any():
                continue
            lines.append(f"{step.direction}, {step.name}: rows from (line) to (column)")
            rows = step.between.tolist()
            width = max(4, len(str(max(map(max, rows)))) + 2)
            lines.append("    " + "".join(f"{rank:>{width}}" for rank in range(len(rows))))
            lines += [
                f"{rank:>4}{''.join(f'{count or str():>{width}}' for count in row)}".rstrip()
                for rank, row in enumerate(rows)
            ]
        return "\n".join(lines)

    def tokens_label(self, side: Side, rank: int) -> str:
        """The samples of a rank, with token positions if it holds only some of them."""
        share = side.share_of[rank]
        tokens_t = share.tokens_t[share.tokens_t != PADDING]
        samples = sorted(set((tokens_t // self.tokens).tolist()))
        places = (tokens_t[tokens_t // self.tokens == samples[0]] % self.tokens).tolist() if samples else []
        text = ", ".join(map(str, samples[:4])) + (" ..." if len(samples) > 4 else "")
        if not samples or len(places) == self.tokens:
            return text or "-"
        return f"{text}: {', '.join(map(str, places[:8]))}" + (" ..." if len(places) > 8 else "")


def coordinates_label(place: tuple[int, int, int]) -> str:
    """Format (dp, cp, tp) coordinates."""
    return " ".join(f"{name}{at}" for name, at in zip(("dp", "cp", "tp"), place, strict=True))


def _of_fast_path(pair: GridPair, how: Delivery, source_rows: int) -> tuple[Step, ...]:
    """Collectives of a fan-in, fan-out or equal path, for the number of rows on a source rank."""
    steps, cp, along_batch = [], pair.destination["cp"], ("all-gather along the batch", pair.gather_lines)
    rows = {"fan-in": source_rows * pair.ratio, "fan-out": source_rows // pair.ratio, "equal": source_rows}[pair.path]
    if pair.path == "fan-in":
        steps.append(_among(pair, "forward", *along_batch, source_rows))
    if cp > 1:
        name, times = (
            ("all-reduce over cp", 2) if how.order is None else ("all-gather over cp of the tokens that each used", 1)
        )
        steps.append(_among(pair, "backward", name, pair.destination.lines("cp"), times * rows // cp))
    if pair.path == "fan-out":
        steps.append(_among(pair, "backward", *along_batch, rows))
    return tuple(steps)


def _among(pair: GridPair, direction: Direction, name: str, lines: Lines, rows: int) -> Step:
    """Every rank of a line sends that many rows to every other rank of it."""
    rows_RR = torch.zeros(pair.source.size, pair.source.size, dtype=torch.int64)
    for line in lines:
        inside = torch.tensor(line) - pair.source.offset
        rows_RR[inside[:, None], inside] = rows
    return Step(direction, name, rows_RR)
