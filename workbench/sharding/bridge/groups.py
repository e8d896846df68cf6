"""Process groups for the lines of grids, created once per set of lines, in the same order on every rank.

Creating a group is a collective of the whole job: every rank calls `GridGroups.make` with the same grids in the same
order. `GridGroups.get`, which is local, looks groups up. Grids that divide the ranks into the same lines share groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workbench.errors import ShardingError
from workbench.sharding import flight, wire
from workbench.sharding.bridge.grid import Grid, Lines
from workbench.sharding.mesh import Axis, Mesh, undivided


class GridGroups:
    """The groups of one rank, for all grids of its job: ``world`` has all its ranks (`mesh.world_axis`)."""

    def __init__(self, world: Axis) -> None:
        self.world = world
        self.rank = world.ranks[world.rank] if world.group is not None else 0
        self._axes: dict[Lines, Axis] = {}

    def __repr__(self) -> str:
        return f"GridGroups(rank {self.rank} of {self.world.size}; {', '.join(map(str, self._axes)) or 'none made'})"

    def make(self, grid: Grid, *names: str) -> Axis:
        """Create the groups of a grid along some dimensions. Collective over the job, also outside the grid.

        Returns:
            This rank's axis; an axis of one rank if it is alone or not in the grid.

        Raises:
            ShardingError: the groups exist already; ranks outside the job.
        """
        return self.make_lines("_".join(names), grid.lines(*names))

    def make_lines(self, name: str, lines: Sequence[Sequence[int]]) -> Axis:
        """Create a group for each of several disjoint sets of ranks. Collective over the job.

        Raises:
            ShardingError: the groups exist already; a rank in two of them, or outside the job.
        """
        lines = _key(lines)
        if lines in self._axes:
            raise ShardingError(
                f"groups {name} of {_label(lines)}",
                found="the same groups exist already",
                rule="a group is created once",
                fix="get the existing groups",
            )
        all_ranks = [rank for line in lines for rank in line]
        if len(set(all_ranks)) != len(all_ranks) or not set(all_ranks) <= set(range(self.world.size)):
            raise ShardingError(
                f"groups {name} of {_label(lines)}",
                found=f"a job of {self.world.size} rank(s)",
                rule="every rank of the job is in at most one of them",
                fix="place the grid on ranks of the job",
            )
        local_axis = Axis(name)
        if self.world.group is not None:
            with flight.entering(
                "make_groups", self.world.name, self.world.ranks, wire.group_name(self.world.group), (len(lines),)
            ):
                for line in lines:
                    if len(line) == 1:
                        continue
                    whole = len(line) == self.world.size
                    group = self.world.group if whole else wire.subgroup(self.world.group, name, line)
                    if group is not None:
                        local_axis = Axis(name, len(line), line.index(self.rank), group, flight.compact(line))
                if any(1 < len(line) < self.world.size for line in lines):
                    # gloo connects ranks in turns: destroying a group at once would break another rank's connection
                    wire.meet(self.world.group)
        self._axes[lines] = local_axis
        return local_axis

    def get(self, grid: Grid, *names: str) -> Axis:
        """Return this rank's axis in existing groups.

        Raises:
            ShardingError: the groups do not exist.
        """
        lines = _key(grid.lines(*names))
        if lines not in self._axes:
            raise ShardingError(
                f"the {'_'.join(names)} group of {grid}",
                found="none",
                rule="a group is created, by all ranks together, before it is looked up",
                fix=f"groups.make(grid, {', '.join(map(repr, names))}) on every rank",
            )
        return replace(self._axes[lines], name="_".join(names))

    def ensure(self, name: str, lines: Sequence[Sequence[int]]) -> Axis:
        """Return existing groups or create them; collective if created."""
        lines = _key(lines)
        return replace(self._axes[lines], name=name) if lines in self._axes else self.make_lines(name, lines)

    def mesh(self, grid: Grid, device: torch.device | str = "cpu") -> Mesh:
        """Return a grid as a `Mesh`. Collective over the job if groups are missing.

        Raises:
            ShardingError: ranks outside the job; this rank is not in the grid (raised after the groups are created).
        """
        axes = {name: self.ensure(name, grid.lines(*name.split("_"))) for name in ("tp", "cp", "dp", "dp_cp")}
        grid.coordinates(self.rank)
        return Mesh(axes | undivided(axes), torch.device(device))

    def destroy(self) -> None:
        """Destroy all groups; idempotent."""
        for axis in self._axes.values():
            if axis.group is not None and axis.group is not self.world.group:
                wire.release(axis.group)
        self._axes.clear()


def _key(lines: Sequence[Sequence[int]]) -> Lines:
    return tuple(tuple(sorted(line)) for line in lines)


def _label(lines: Lines) -> str:
    shown = [f"({', '.join(map(str, line))})" for line in lines[:4]]
    return ", ".join(shown) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
