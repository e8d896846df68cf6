"""An alignment on ranks that are threads, and the engine that comes after backward."""

from __future__ import annotations

import threading
from dataclasses import replace

from tests.helpers.threads import Threads, on_threads
from workbench.parallel_loss.align import Alignment
from workbench.sharding.mesh import Axis


def on_ranks(function, *, cp=1, dp=1, engine="sum"):
    """Return ``function(align, d, c)`` of each rank, dp-major."""
    groups = [_line("cp", [(d, c) for c in range(cp)]) for d in range(dp)]
    groups += [_line("dp", [(d, c) for d in range(dp)]) for c in range(cp)]
    places = [(d, c) for d in range(dp) for c in range(cp)]

    def rank(number):
        d, c = places[number]
        return function(Alignment(groups[d][d, c], (groups[dp + c][d, c],), engine), d, c)

    return on_threads(rank, len(places))


def collectives(function, **ranks):
    """Return the collectives of each rank of `on_ranks`, in order: group, shape and dtype."""

    def rank(align, d, c):
        brought = []
        noted = [_noting(axis, brought) for axis in (align.cp, *align.dp)]
        function(Alignment(noted[0], tuple(noted[1:]), align.engine), d, c)
        return brought

    return on_ranks(rank, **ranks)


class _Noting:
    """A simulated group that records its collectives."""

    def __init__(self, group, name, brought):
        self.group, self.rank, self.name, self.brought = group, group.rank, name, brought

    def exchange(self, tensor):
        self.brought.append((self.name, tuple(tensor.shape), tensor.dtype))
        return self.group.exchange(tensor)


def _noting(axis, brought):
    return axis if axis.group is None else replace(axis, group=_Noting(axis.group, axis.name, brought))


def reduced(gradients, engine):
    """Return the engine's reduction of each rank's gradients of one weight."""
    total = sum(gradients)
    return total / len(gradients) if engine == "mean" else total


def _line(name, places):
    slots, barrier = [None] * len(places), threading.Barrier(len(places), timeout=120.0)
    return {
        place: Axis(name, len(places), at, Threads(at, slots, barrier) if len(places) > 1 else None)
        for at, place in enumerate(places)
    }
