"""What a bridge delivers, who holds which tokens before and after, and which path that allows.

Letters: t tokens of a sequence that a rank holds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import ShardingError
from workbench.sharding.bridge.crossing import Crossing
from workbench.sharding.bridge.pair import GridPair
from workbench.sharding.bridge.partition import check_stretches, owned
from workbench.sharding.bridge.sides import Side, blocks, numbers, sharded, stacked, whole


@dataclass(frozen=True)
class Delivery:
    """What the ranks of the destination get, and how a source that shards its sequence does so.

    Attributes:
        kind: "whole": whole sequences on every cp rank, which the module cuts itself (`SequencePartition`). "sharded":
            each cp rank its own tokens; nobody ever holds a whole sequence.
        order: the destination's order of tokens over cp. Where sequences come whole, it says who uses which tokens;
            None: nobody knows, and all gradients are summed.
        sequence_parallel: each tp rank its stretch of what is delivered.
        source_order: the order over cp of a source that shards its sequence.

    Raises:
        ShardingError: settings that contradict each other.
    """

    kind: Literal["whole", "sharded"] = "whole"
    order: str | None = None
    sequence_parallel: bool = False
    source_order: str | None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        if self.kind not in ("whole", "sharded"):
            raise ShardingError(f"bridge with delivery {self.kind!r}", rule="whole or sharded", fix="choose one")
        if self.kind == "whole" and self.sequence_parallel:
            raise ShardingError(
                "bridge that delivers whole sequences, with sequence_parallel",
                rule="a whole sequence is cut by the module that gets it",
                fix="SequencePartition(cp, order, tp), or delivery 'sharded'",
            )


@dataclass(frozen=True)
class Route:
    """How one activation crosses.

    Attributes:
        samples: of each dp rank of the source.
        path: fan-in, fan-out, equal or general.
        why: which bound of the fast path sent it to the general one; "" on the fast path.
    """

    samples: tuple[int, ...]
    path: str
    why: str = ""


def check_delivery(pair: GridPair, how: Delivery) -> None:
    """Refuse a delivery that leaves open which cp rank has which token.

    Raises:
        ShardingError: a grid that shards its sequence without an order.
    """
    if pair.source["cp"] > 1 and how.source_order is None:
        raise ShardingError(
            f"bridge from {pair.source}",
            found="no source_order",
            rule="a source that shards its sequence says in which order",
            fix="source_order='zigzag', or another of the orders",
        )
    if how.kind == "sharded" and how.order is None and pair.destination["cp"] > 1:
        raise ShardingError(
            f"bridge that delivers shards to {pair.destination}",
            found="no order",
            rule="a destination that shards its sequence says in which order",
            fix="order='zigzag', or another of the orders",
        )


def route_of(pair: GridPair, how: Delivery, samples: Sequence[int]) -> Route:
    """How an activation with so many samples on each dp rank of the source crosses.

    Raises:
        ShardingError: not a number for each of them.
    """
    held = tuple(samples)
    if len(held) != pair.source["dp"] or min(held) < 0:
        raise ShardingError(
            f"bridge of {held} samples",
            found=f"{len(held)} numbers",
            rule=f"one for each of the {pair.source['dp']} dp ranks of the source",
            fix="say how many each holds",
        )
    why = pair.why_general
    if not why and how.kind == "sharded":
        why = "shards are delivered, not whole sequences"
    if not why and len(set(held)) > 1:
        why = f"I9: samples differ by dp rank, {min(held)} to {max(held)}"
    if not why and pair.path == "fan-out" and held[0] % pair.ratio:
        why = f"I8: {held[0]} samples in {pair.ratio} slots"
    return Route(held, "general" if why else pair.path, why)


@functools.lru_cache(maxsize=32)
def crossing_of(pair: GridPair, how: Delivery, samples: tuple[int, ...], tokens: int) -> Crossing:
    """The general path of activations with so many samples on each dp rank of the source; see `sides_of`."""
    return Crossing.make(*sides_of(pair, how, samples, tokens))


def sides_of(pair: GridPair, how: Delivery, samples: Sequence[int], tokens: int) -> tuple[Side, Side]:
    """Who holds which tokens; token s of sample b has number b * tokens + s."""
    source, destination = pair.source, pair.destination
    at_source = owned(how.source_order or "contiguous", tokens, source["cp"])
    every = torch.arange(tokens)
    before, after = stacked(samples), blocks(sum(samples), destination["dp"])
    given = sharded(source, lambda dp, cp, _: numbers(before[dp], tokens, at_source[cp]))
    if how.kind == "whole" and how.order is None:
        return given, whole(destination, lambda dp: numbers(after[dp], tokens, every))
    at_destination = owned(how.order or "contiguous", tokens, destination["cp"])
    if how.kind == "sharded":
        if how.sequence_parallel:
            check_stretches(tokens, destination["cp"], destination["tp"])
        stretches = destination["tp"] if how.sequence_parallel else 1
        places = at_destination.view(destination["cp"], stretches, -1)
        return given, sharded(
            destination, lambda dp, cp, tp: numbers(after[dp], tokens, places[cp, tp]), over_tp=how.sequence_parallel
        )

    def answers(dp: int, cp: int) -> Tensor:
        mine = torch.zeros(tokens, dtype=torch.bool)
        mine[at_destination[cp]] = True
        return mine.repeat(after[dp][1] - after[dp][0])

    return given, whole(destination, lambda dp: numbers(after[dp], tokens, every), answers)
