"""Bridge: `connect` creates the groups, once; `Bridge.cross` moves one activation per micro-batch.

It takes the fast path if the layouts and the samples allow it, and otherwise the general path.

Letters: b samples of a rank | s tokens of a sequence | h features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.errors import ShapeError, ShardingError
from workbench.sharding.bridge.crossing import check_replicas
from workbench.sharding.bridge.delivery import Delivery, Route, check_delivery, crossing_of, owned_positions, route_of
from workbench.sharding.bridge.direct import Direct, cross_directly
from workbench.sharding.bridge.grid import Grid, GridPair
from workbench.sharding.bridge.groups import GridGroups
from workbench.sharding.bridge.sides import blocks
from workbench.sharding.collectives import gather_equal
from workbench.sharding.mesh import Axis, GivenGroup, axis_of

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
    """Build a bridge. Collective over the job, also on ranks outside the grids.

    Delivery and orders are as in `Delivery`. Existing groups of this rank are used, missing ones are created; ``cp`` is
    the cp group of the destination, if the trainer has one.

    Raises:
        ShardingError: a broken invariant between the grids (I1, I5, I6), an invalid layout (I10) or delivery.
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
    all_ranks = groups.ensure("bridge", (tuple(source.ranks),))
    gather, along_cp = Axis("gather"), Axis("cp")
    if pair.path != "general" and delivery == "whole":
        if pair.gather_lines:
            gather = groups.ensure("gather", pair.gather_lines)
        along_cp = groups.ensure("cp", destination.lines("cp")) if cp is None else axis_of(cp, "cp")
        _refuse_other_group(along_cp, destination, groups.rank)
    return Bridge(pair, how, layout, groups.rank, all_ranks, gather, along_cp)


@dataclass(frozen=True, eq=False, repr=False)
class Bridge:
    """One rank's bridge from the layout of one module to that of another.

    Attributes:
        pair: the grids.
        delivery: what the destination receives.
        layout: of activations, "bsh" or "sbh".
        rank: of the job.
        all_ranks: all ranks of the grids.
        gather: the ranks that gather along the batch on the fast path.
        cp: the cp ranks of the destination.
    """

    pair: GridPair
    delivery: Delivery
    layout: str
    rank: int
    all_ranks: Axis
    gather: Axis
    cp: Axis

    def __repr__(self) -> str:
        route = self.route([self.pair.ratio or 1] * self.pair.source["dp"])
        why = f" ({route.why})" if route.why else ""
        return (
            f"Bridge({self.pair.source.label} -> {self.pair.destination.label}: {route.path}{why}, "
            f"{self.delivery.kind} sequences)"
        )

    def route(self, samples: Sequence[int]) -> Route:
        """The route of an activation with these numbers of samples on the dp ranks of the source."""
        return route_of(self.pair, self.delivery, samples)

    def cross(self, local: Tensor, samples: Sequence[int] | None = None, *, checked: bool = False) -> Tensor:
        """Move an activation to the destination. Collective over all ranks of the grids, and so is its backward.

        Samples are dealt over the destination's dp ranks in order, as evenly as possible. Every rank must use the
        result in its loss, also if it is empty; otherwise the other ranks hang in backward.

        Args:
            local: this rank's activation at the source; the same on all tp ranks.
            samples: of each dp rank of the source; None: gathered, in a small collective.
            checked: check that replicas hold equal values and gradients; a small collective each way.

        Shapes:   [b, s, h] -> [b', s', h] (or [s, b, h]); s' = s if whole sequences are delivered.
        Layout:   of the source -> dp: sharded(b); cp: replicated or sharded(s); tp: replicated or, with
                  sequence_parallel, sharded(s).
        Backward: the sum over distinct consumers: complete over the destination's cp, the same on every tp rank of the
                  source. The gradient on each tp rank of the destination must be complete.
        Raises:   ShapeError: not three dimensions of floating point, or not the declared samples.
                  ShardingError: a length that orders cannot split; a rank outside the grids; see ``checked``.
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
            samples = self._gathered_samples(count, tokens, local.device)
        route = self.route(samples)
        if route.samples[dp] != count:
            raise ShapeError(
                "cross a bridge",
                found=f"{count} samples on dp rank {dp}",
                rule=f"{route.samples[dp]}, as declared in samples",
                fix="pass the number of samples of each dp rank",
            )
        if route.path == "general":
            return self._cross_generally(local, route, tokens, checked=checked)
        order, slot = self.delivery.order, self.pair.slot(self.rank)
        owned_Rt = None if order is None else owned_positions(order, tokens, self.pair.destination["cp"])
        direct = Direct(route.path, slot, self.pair.ratio, batch_dim, sequence_dim, self.gather, self.cp, owned_Rt)
        if not checked:
            return cross_directly(local, direct)
        crossing = crossing_of(self.pair, self.delivery, route.samples, tokens)
        check_replicas(self._rows(local), crossing.source, self.all_ranks, what="values at the source")
        out = cross_directly(local, direct)
        if out.requires_grad:
            out.register_hook(
                lambda gradient: check_replicas(
                    self._rows(gradient), crossing.destination, self.all_ranks, what="gradients at the destination"
                )
            )
        return out

    def _cross_generally(self, local: Tensor, route: Route, tokens: int, *, checked: bool) -> Tensor:
        destination, how = self.pair.destination, self.delivery
        crossing = crossing_of(self.pair, how, route.samples, tokens)
        rows = crossing.cross(self._rows(local), self.all_ranks, checked=checked)
        begin, end = blocks(sum(route.samples), destination["dp"])[destination.place(self.rank)[0]]
        over = destination["cp"] if how.kind == "sharded" else 1
        over *= destination["tp"] if how.sequence_parallel else 1
        out = rows.view(end - begin, tokens // over, local.shape[2])
        return out.movedim(0, LAYOUTS[self.layout][0]).contiguous()

    def _rows(self, values: Tensor) -> Tensor:
        """[b * s, h] rows, sample by sample."""
        return values.movedim(LAYOUTS[self.layout][0], 0).flatten(0, 1)

    def _gathered_samples(self, count: int, tokens: int, device: torch.device) -> tuple[int, ...]:
        """The samples of each dp rank of the source, gathered from all ranks."""
        source = self.pair.source
        gathered = gather_equal(torch.tensor([count, tokens], device=device), self.all_ranks).tolist()
        by_dp: dict[int, tuple[int, int]] = {}
        for rank, (samples, length) in zip(source.ranks, gathered, strict=True):
            first = by_dp.setdefault(source.place(rank)[0], (samples, length))
            if first != (samples, length) or length != by_dp[0][1]:
                raise ShardingError(
                    f"bridge from {source}",
                    found=f"rank {rank} has {samples} samples of {length} tokens, others {first[0]} of {by_dp[0][1]}",
                    rule="ranks of one dp slot pass the same samples, and all sequences have one length (I9)",
                    fix="sequences of several lengths cross as rows, with Crossing",
                )
        return tuple(by_dp[dp][0] for dp in range(source["dp"]))


def _refuse_other_group(cp: Axis, destination: Grid, rank: int) -> None:
    """Raise if a cp group is not the grid's (I6)."""
    line = next((line for line in destination.lines("cp") if rank in line), ())
    ranks = tuple(cp.ranks) if cp.size > 1 else (rank,)
    if line and ranks != line:
        raise ShardingError(
            f"bridge to {destination}: cp group (I6)",
            found=f"ranks {ranks} on rank {rank}",
            rule=f"its cp ranks are {line}, in this order",
            fix="pass the cp group of that layout, or none",
        )
