"""A bridge between two modules that share their ranks and not their layout: activations forward, gradients back.

`connect` makes the groups, once; `Bridge.cross` takes an activation across as often as there are micro-batches, on the
fast path where the layouts and the samples allow it, and otherwise on the general one.

Letters: b samples of a rank | s tokens of a sequence | h features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import ShapeError, ShardingError
from workbench.sharding.bridge.delivery import Delivery, Route, check_delivery, crossing_of, route_of
from workbench.sharding.bridge.direct import Direct, hand_over
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.bridge.groups import GridGroups
from workbench.sharding.bridge.pair import GridPair
from workbench.sharding.bridge.partition import owned
from workbench.sharding.bridge.replicas import hold_replicas
from workbench.sharding.bridge.sides import blocks
from workbench.sharding.collectives import gather_equal
from workbench.sharding.given_groups import GivenGroup, axis_of
from workbench.sharding.mesh import Axis

LAYOUTS = {"bsh": (0, 1), "sbh": (1, 0)}
"""Name of an activation's layout -> its dimensions of samples and of tokens."""


def connect(
    source: Grid,
    destination: Grid,
    groups: GridGroups,
    *,
    layout: str = "bsh",
    delivery: Literal["whole", "sharded"] = "whole",
    order: str | None = None,
    source_order: str | None = None,
    sequence_parallel: bool = False,
    cp: GivenGroup | None = None,
) -> Bridge:
    """Build a bridge. Collective over the job, on ranks outside of the grids too.

    Args:
        source: the layout of the module whose activations cross.
        destination: the layout of the module that reads them.
        groups: of this rank; what is there is used, what is missing is made.
        layout: of activations: "bsh" or "sbh".
        delivery: see `Delivery`.
        order: see `Delivery`.
        source_order: see `Delivery`.
        sequence_parallel: see `Delivery`.
        cp: the cp group of the destination, if the trainer has one; None: that of ``groups``.

    Raises:
        ShardingError: an invariant between the grids (I1, I5, I6), a layout (I10) or a delivery that cannot be.
    """
    pair = GridPair(source, destination)
    how = Delivery(delivery, order, sequence_parallel, source_order)
    if layout not in LAYOUTS:
        raise ShardingError(
            f"bridge with layout {layout!r} (I10)",
            rule=f"one of {', '.join(LAYOUTS)}",
            fix="for packed rows, use Crossing, which takes rows by token number",
        )
    check_delivery(pair, how)
    everyone = groups.ensure("bridge", (tuple(source.ranks),))
    gather, along_cp = Axis("gather"), Axis("cp")
    if pair.path != "general" and delivery == "whole":
        if pair.gather_lines:
            gather = groups.ensure("gather", pair.gather_lines)
        along_cp = groups.ensure("cp", destination.lines("cp")) if cp is None else axis_of(cp, "cp")
        _refuse_other_group(along_cp, destination, groups.rank)
    return Bridge(pair, how, layout, groups.rank, everyone, gather, along_cp)


@dataclass(frozen=True, eq=False, repr=False)
class Bridge:
    """From the layout of one module to that of another, on one rank.

    Attributes:
        pair: the grids.
        delivery: what the destination gets.
        layout: of activations.
        rank: of the job.
        everyone: all ranks of the grids.
        gather: the ranks that gather along the batch on the fast path.
        cp: the cp ranks of the destination.
    """

    pair: GridPair
    delivery: Delivery
    layout: str
    rank: int
    everyone: Axis
    gather: Axis
    cp: Axis

    def __repr__(self) -> str:
        """Say which way leads across."""
        route = self.route([self.pair.ratio or 1] * self.pair.source["dp"])
        why = f" ({route.why})" if route.why else ""
        return (
            f"Bridge({self.pair.source.words} -> {self.pair.destination.words}: {route.path}{why}, "
            f"{self.delivery.kind} sequences)"
        )

    def route(self, samples: Sequence[int]) -> Route:
        """How an activation with so many samples on each dp rank of the source crosses."""
        return route_of(self.pair, self.delivery, samples)

    def cross(self, local: Tensor, samples: Sequence[int] | None = None, *, checked: bool = False) -> Tensor:
        """Take an activation across. Collective over all ranks of the grids, and so is its backward.

        Samples are dealt over the destination's dp ranks in order, as evenly as they go. Every rank uses what it gets
        in its loss, also where that is empty; or the others wait in backward.

        Args:
            local: what this rank holds at the source; tp ranks hold the same.
            samples: of each dp rank of the source; None: they are asked, in a small collective.
            checked: see that replicas hold the same and bring the same gradient; a small collective each way.

        Shapes:   [b, s, h] -> [b', s', h] (or [s, b, h]); s' = s where whole sequences are delivered.
        Layout:   of the source -> dp: sharded(b); cp: replicated or sharded(s); tp: replicated or, with
                  sequence_parallel, sharded(s).
        Backward: the sum over distinct consumers: complete over the destination's cp, the same on every tp rank of the
                  source. It wants the gradient of each tp rank of the destination to be whole.
        Raises:   ShapeError: not three dimensions of floating point, or not the samples that were said.
                  ShardingError: a length that orders cannot cut; a rank outside of the grids; see ``checked``.
        """
        source = self.pair.source
        dp = source.place(self.rank)[0]
        batch_dim, sequence_dim = LAYOUTS[self.layout]
        if local.dim() != 3 or not local.is_floating_point():
            raise ShapeError(
                "cross a bridge",
                found=f"{tuple(local.shape)} {local.dtype}",
                rule=f"[{self.layout[0]}, {self.layout[1]}, h] of floating point",
                fix="packed rows cross with Crossing",
            )
        count, tokens = local.shape[batch_dim], local.shape[sequence_dim] * source["cp"]
        if samples is None:
            samples = self._ask(count, tokens, local.device)
        route = self.route(samples)
        if route.samples[dp] != count:
            raise ShapeError(
                "cross a bridge",
                found=f"{count} samples on dp rank {dp}",
                rule=f"{route.samples[dp]}, as was said of it",
                fix="say what each dp rank holds",
            )
        if route.path == "general":
            return self._cross_generally(local, route, tokens, checked=checked)
        owned_Rt = None
        if self.delivery.order is not None:
            owned_Rt = owned(self.delivery.order, tokens, self.pair.destination["cp"])
        slot = self.pair.slot(self.rank)
        direct = Direct(route.path, slot, self.pair.ratio, batch_dim, sequence_dim, self.gather, self.cp, owned_Rt)
        if not checked:
            return hand_over(local, direct)
        crossing = crossing_of(self.pair, self.delivery, route.samples, tokens)
        hold_replicas(self._rows(local), crossing.source, self.everyone, what="values at the source")
        out = hand_over(local, direct)
        if out.requires_grad:
            out.register_hook(
                lambda gradient: hold_replicas(
                    self._rows(gradient), crossing.destination, self.everyone, what="gradients at the destination"
                )
            )
        return out

    def _cross_generally(self, local: Tensor, route: Route, tokens: int, *, checked: bool) -> Tensor:
        destination, how = self.pair.destination, self.delivery
        crossing = crossing_of(self.pair, how, route.samples, tokens)
        rows = crossing.cross(self._rows(local), self.everyone, checked=checked)
        begin, end = blocks(sum(route.samples), destination["dp"])[destination.place(self.rank)[0]]
        over = destination["cp"] if how.kind == "sharded" else 1
        over *= destination["tp"] if how.sequence_parallel else 1
        out = rows.view(end - begin, tokens // over, local.shape[2])
        return out.movedim(0, LAYOUTS[self.layout][0]).contiguous()

    def _rows(self, values: Tensor) -> Tensor:
        """Sample after sample, token after token."""
        return values.movedim(LAYOUTS[self.layout][0], 0).flatten(0, 1)

    def _ask(self, count: int, tokens: int, device: torch.device) -> tuple[int, ...]:
        """The samples of each dp rank of the source, from all ranks."""
        source = self.pair.source
        everyone = gather_equal(torch.tensor([count, tokens], device=device), self.everyone).tolist()
        held: dict[int, tuple[int, int]] = {}
        for rank, (samples, length) in zip(source.ranks, everyone, strict=True):
            first = held.setdefault(source.place(rank)[0], (samples, length))
            if first != (samples, length) or length != held[0][1]:
                raise ShardingError(
                    f"bridge from {source}",
                    found=f"rank {rank} brings {samples} samples of {length} tokens, others {first[0]} of {held[0][1]}",
                    rule="ranks of one dp slot bring the same samples, and all sequences have one length (I9)",
                    fix="sequences of several lengths cross as rows, with Crossing",
                )
        return tuple(held[dp][0] for dp in range(source["dp"]))


def _refuse_other_group(cp: Axis, destination: Grid, rank: int) -> None:
    """Refuse a cp group that is not the grid's (I6)."""
    line = next((line for line in destination.lines("cp") if rank in line), ())
    ranks = tuple(cp.ranks) if cp.size > 1 else (rank,)
    if line and ranks != line:
        raise ShardingError(
            f"bridge to {destination}: cp group (I6)",
            found=f"ranks {ranks} on rank {rank}",
            rule=f"its cp ranks are {line}, in this order",
            fix="give the cp group of that layout, or none",
        )
