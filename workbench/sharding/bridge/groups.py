"""Groups of ranks for the lines of grids: every set of lines has one, made once, in one order on every rank.

Making a group is a collective of the whole job. So groups are made by `GridGroups.make`, which every rank calls with
the same grids in the same order, and looked up by `GridGroups.get`, which is local. Grids that cut the ranks into the
same lines share their groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workbench.errors import ShardingError
from workbench.sharding import flight, wire
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.mesh import Axis, Mesh

Lines = tuple[tuple[int, ...], ...]


class GridGroups:
    """The groups of one rank, for all grids of its job.

    Args:
        world: all ranks of the job (`workbench.sharding.given_groups.world_axis`; among simulated ranks, an axis that
            has them all).
    """

    def __init__(self, world: Axis) -> None:
        self.world = world
        self.rank = world.ranks[world.rank] if world.group is not None else 0
        self._axes: dict[Lines, Axis] = {}

    def __repr__(self) -> str:
        """Say which lines have groups."""
        return f"GridGroups(rank {self.rank} of {self.world.size}; {', '.join(map(str, self._axes)) or 'none made'})"

    def make(self, grid: Grid, *names: str) -> Axis:
        """Make the groups of a grid along some dimensions. Collective over the job, grid or not.

        Returns:
            This rank's axis; one rank where it is alone, or not in the grid.

        Raises:
            ShardingError: they are there already; ranks that the job does not have.
        """
        return self.make_lines("_".join(names), grid.lines(*names))

    def make_lines(self, name: str, lines: Sequence[Sequence[int]]) -> Axis:
        """Make a group for each of several sets of ranks that share no rank. Collective over the job.

        Raises:
            ShardingError: they are there already; a rank in two of them, or one that the job does not have.
        """
        lines = _key(lines)
        if lines in self._axes:
            raise ShardingError(
                f"groups {name} of {_words(lines)}",
                found="the same groups, made before",
                rule="a group is made once",
                fix="get what is there",
            )
        everyone = [rank for line in lines for rank in line]
        if len(set(everyone)) != len(everyone) or not set(everyone) <= set(range(self.world.size)):
            raise ShardingError(
                f"groups {name} of {_words(lines)}",
                found=f"a job of {self.world.size} rank(s)",
                rule="every rank of the job is in at most one of them",
                fix="lay the grid over ranks that are there",
            )
        mine = Axis(name)
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
                        mine = Axis(name, len(line), line.index(self.rank), group, flight.compact(line))
                if any(1 < len(line) < self.world.size for line in lines):
                    wire.meet(self.world.group)  # gloo connects in turns: who gave a group up at once would break one
        self._axes[lines] = mine
        return mine

    def get(self, grid: Grid, *names: str) -> Axis:
        """This rank's axis in groups that were made.

        Raises:
            ShardingError: they were not.
        """
        lines = _key(grid.lines(*names))
        if lines not in self._axes:
            raise ShardingError(
                f"the {'_'.join(names)} group of {grid}",
                found="none",
                rule="a group is made, by all ranks together, before it is looked up",
                fix=f"groups.make(grid, {', '.join(map(repr, names))}) on every rank",
            )
        return replace(self._axes[lines], name="_".join(names))

    def ensure(self, name: str, lines: Sequence[Sequence[int]]) -> Axis:
        """What is there already, or what is made now; collective if it is made."""
        lines = _key(lines)
        return replace(self._axes[lines], name=name) if lines in self._axes else self.make_lines(name, lines)

    def mesh(self, grid: Grid, device: torch.device | str = "cpu") -> Mesh:
        """A grid as the mesh that everything else here runs on. Collective over the job where groups are missing.

        Raises:
            ShardingError: ranks that the job does not have; this rank is not in the grid (after all have made it).
        """
        axes = {name: self.ensure(name, grid.lines(*name.split("_"))) for name in ("tp", "cp", "dp", "dp_cp")}
        grid.coordinates(self.rank)
        axes |= {"cp_inner": Axis("cp_inner"), "cp_outer": replace(axes["cp"], name="cp_outer")}
        return Mesh(axes, torch.device(device))

    def destroy(self) -> None:
        """Give up all groups; once more does nothing."""
        for axis in self._axes.values():
            if axis.group is not None and axis.group is not self.world.group:
                wire.release(axis.group)
        self._axes.clear()


def _key(lines: Sequence[Sequence[int]]) -> Lines:
    return tuple(tuple(sorted(line)) for line in lines)


def _words(lines: Lines) -> str:
    shown = [f"({', '.join(map(str, line))})" for line in lines[:4]]
    return ", ".join(shown) + (f" and {len(lines) - 4} more" if len(lines) > 4 else "")
