"""Delivery of a bridge: tokens of each rank before and after, the path that they allow; sharding of whole sequences.

Letters: T tokens of a sequence | R ranks of cp | t tokens of a sequence that a cp rank holds.
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
from workbench.sharding.bridge.grid import GridPair
from workbench.sharding.bridge.sides import Side, blocks, numbers, sharded, stacked, whole
from workbench.sharding.collectives import slice_gather
from workbench.sharding.mesh import Axis
from workbench.sharding.plan import ShardPlan


@dataclass(frozen=True)
class Delivery:
    """Tokens that the destination ranks receive, and the token order of a source that shards its sequence.

    Attributes:
        kind: "whole": whole sequences on every cp rank, which the module shards itself (`SequencePartition`).
            "sharded": its own tokens on each cp rank.
        order: the destination's token order over cp. For whole sequences, it defines the tokens that each rank uses;
            None: unknown, and all gradients are summed.
        sequence_parallel: each tp rank receives a contiguous run of the delivered tokens.
        source_order: the token order over cp of a source that shards its sequence.

    Raises:
        ShardingError: settings that contradict each other.
    """

    kind: Literal["whole", "sharded"] = "whole"
    order: str | None = None
    sequence_parallel: bool = False
    source_order: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("whole", "sharded"):
            raise ShardingError(f"bridge with delivery {self.kind!r}", rule="whole or sharded", fix="choose one")
        if self.kind == "whole" and self.sequence_parallel:
            raise ShardingError(
                "bridge that delivers whole sequences, with sequence_parallel",
                rule="a whole sequence is sharded by the module that receives it",
                fix="SequencePartition(cp, order, tp), or delivery 'sharded'",
            )


@dataclass(frozen=True)
class Route:
    """Path of one activation across a bridge.

    Attributes:
        samples: of each dp rank of the source.
        path: fan-in, fan-out, equal or general.
        why: the violated condition of the fast path; "" on the fast path.
    """

    samples: tuple[int, ...]
    path: str
    why: str = ""


def check_delivery(pair: GridPair, how: Delivery) -> None:
    """Raise if a grid shards its sequence without an order, which determines the cp rank of each token."""
    if pair.source["cp"] > 1 and how.source_order is None:
        raise ShardingError(
            f"bridge from {pair.source}",
            found="no source_order",
            rule="a source that shards its sequence needs a token order",
            fix="source_order='zigzag', or another of the orders",
        )
    if how.kind == "sharded" and how.order is None and pair.destination["cp"] > 1:
        raise ShardingError(
            f"bridge that delivers shards to {pair.destination}",
            found="no order",
            rule="a destination that shards its sequence needs a token order",
            fix="order='zigzag', or another of the orders",
        )


def route_of(pair: GridPair, how: Delivery, samples: Sequence[int]) -> Route:
    """The route of an activation with these numbers of samples on the dp ranks of the source.

    Raises:
        ShardingError: not one nonnegative number per dp rank.
    """
    counts = tuple(samples)
    if len(counts) != pair.source["dp"] or min(counts) < 0:
        raise ShardingError(
            f"bridge of {counts} samples",
            found=f"{len(counts)} numbers",
            rule=f"one for each of the {pair.source['dp']} dp ranks of the source",
            fix="pass the number of samples of each dp rank",
        )
    why = pair.why_general
    if not why and how.kind == "sharded":
        why = "shards are delivered, not whole sequences"
    if not why and len(set(counts)) > 1:
        why = f"I9: samples differ by dp rank, {min(counts)} to {max(counts)}"
    if not why and pair.path == "fan-out" and counts[0] % pair.ratio:
        why = f"I8: {counts[0]} samples in {pair.ratio} slots"
    return Route(counts, "general" if why else pair.path, why)


@functools.lru_cache(maxsize=32)
def crossing_of(pair: GridPair, how: Delivery, samples: tuple[int, ...], tokens: int) -> Crossing:
    """The crossing between `sides_of` the same arguments."""
    return Crossing.make(*sides_of(pair, how, samples, tokens))


def sides_of(pair: GridPair, how: Delivery, samples: Sequence[int], tokens: int) -> tuple[Side, Side]:
    """Tokens of each rank before and after; token s of sample b has number b * tokens + s."""
    source, destination = pair.source, pair.destination
    at_source = owned_positions(how.source_order or "contiguous", tokens, source["cp"])
    every = torch.arange(tokens)
    before, after = stacked(samples), blocks(sum(samples), destination["dp"])
    given = sharded(source, lambda dp, cp, _: numbers(before[dp], tokens, at_source[cp]))
    if how.kind == "whole" and how.order is None:
        return given, whole(destination, lambda dp: numbers(after[dp], tokens, every))
    at_destination = owned_positions(how.order or "contiguous", tokens, destination["cp"])
    if how.kind == "sharded":
        if how.sequence_parallel:
            check_tp_divides(tokens, destination["cp"], destination["tp"])
        runs = destination["tp"] if how.sequence_parallel else 1
        places = at_destination.view(destination["cp"], runs, -1)
        return given, sharded(
            destination, lambda dp, cp, tp: numbers(after[dp], tokens, places[cp, tp]), over_tp=how.sequence_parallel
        )

    def answers(dp: int, cp: int) -> Tensor:
        used = torch.zeros(tokens, dtype=torch.bool)
        used[at_destination[cp]] = True
        return used.repeat(after[dp][1] - after[dp][0])

    return given, whole(destination, lambda dp: numbers(after[dp], tokens, every), answers)


_ALONE = Axis("tp")


@dataclass(frozen=True)
class SequencePartition:
    """Sharding of a whole sequence: over cp by a token order, then over tp in contiguous runs (sequence parallelism).

    For a module that receives whole sequences on each of its cp ranks. ``tp`` is one rank if tp ranks hold the cp shard
    whole. Both groups are passed explicitly: on ranks that two modules share, each module has its own groups.
    """

    cp: Axis
    order: str = "zigzag"
    tp: Axis = _ALONE

    def split(self, whole: Tensor, *, dim: int) -> Tensor:
        """Return this rank's tokens, in its local order.

        Shapes:   [..., T, ...] -> [..., T / (cp tp), ...] along ``dim``.
        Layout:   the same on all ranks of cp and tp -> cp: sharded(T); tp: sharded(t).
        Backward: all-gathered over tp, so that it is the same on each rank; over cp zero at positions of other ranks,
                  so that the sum over cp, which a bridge computes, is complete.
        Raises:   ShardingError: a length that does not divide (I13).
        """
        tokens = whole.shape[dim]
        positions_t = owned_positions(self.order, tokens, self.cp.size)[self.cp.rank].to(whole.device)
        local = whole.index_select(dim, positions_t) if self.cp.size > 1 else whole
        check_tp_divides(tokens, self.cp.size, self.tp.size)
        return slice_gather(local, self.tp, dim=dim)


def check_tp_divides(tokens: int, cp: int, tp: int) -> None:
    """Raise if tp does not divide the tokens of a cp rank (I13)."""
    if tokens // cp % tp:
        raise ShardingError(
            f"sequence of {tokens} tokens over cp={cp} and tp={tp} (I13)",
            found=f"{tokens // cp} tokens on a cp rank",
            rule="tp divides the tokens of a cp rank",
            fix=f"pad to a multiple of 2 * cp * tp = {2 * cp * tp}",
        )


@functools.lru_cache(maxsize=64)
def owned_positions(order: str, tokens: int, cp: int) -> Tensor:
    """[R, t] positions of a sequence on each cp rank, in its local order; on the host, cached, read-only.

    Raises:
        ShardingError: an unknown order, or a length that does not divide.
    """
    if cp == 1:
        return torch.arange(tokens)[None]
    return ShardPlan.make(order, num_tokens=tokens, cp=cp, document_lengths=(tokens,)).permutation_T.view(cp, -1)
