"""The mesh: named axes dp, cp and tp over the ranks of a job.

tp varies fastest, then cp, then dp: ranks that communicate most are neighbours. An axis of size 1 has no process
group, so a single process needs no rendezvous.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from workbench.errors import ShardingError
from workbench.sharding import flight
from workbench.sharding.wire import Group

AXES = ("dp", "cp", "tp")


@dataclass(frozen=True)
class Axis:
    """One named axis, with this rank's coordinate.

    Attributes:
        name: "dp", "cp", "tp"; "dp_cp" for the two flattened; "cp_inner" and "cp_outer" for cp split in two.
        size: ranks along it.
        rank: this rank's coordinate.
        group: process group (or simulated group) of the ranks that differ only in this coordinate; None if size is 1.
        ranks: global ranks of that group.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Group | None = None
    ranks: Sequence[int] = ()


@dataclass(frozen=True)
class Mesh:
    """The axes of a job and this rank's coordinates.

    Attributes:
        axes: dp, cp, tp; the flattened dp_cp, over which gradients are summed; and cp split in two for hybrid
            attention: cp_inner, neighbours on cp, varies fastest; cp_outer, ranks with the same cp_inner coordinate.
        device: device of this rank.
    """

    axes: Mapping[str, Axis]
    device: torch.device

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinates, axis -> coordinate."""
        return {name: self.axes[name].rank for name in AXES}

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self["dp"].size * self["cp"].size * self["tp"].size

    @property
    def is_first(self) -> bool:
        """True if this is the rank that writes records."""
        return not any(self.coordinates.values())


def single_process_mesh(device: torch.device | str = "cpu") -> Mesh:
    """The mesh of one rank."""
    return Mesh({name: Axis(name) for name in (*AXES, "dp_cp", "cp_inner", "cp_outer")}, torch.device(device))


def make_mesh(
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ulysses: int = 1,
    device: torch.device | str = "cpu",
    alone: bool = False,
    **refused: int,
) -> Mesh:
    """Create named axes over the ranks of the running job, or over this process alone.

    Collective unless ``alone``: every rank calls it with the same sizes. Call `join` first if there is more than one
    rank.

    Args:
        dp: data-parallel ranks.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        ulysses: size of cp_inner, neighbours on cp.
        device: device of this rank.
        alone: treat this process as the whole job.
        refused: unsupported axes.

    Raises:
        ShardingError: an axis that is not supported (pp, ep), or sizes whose product is not the world size.
    """
    for name in refused:
        raise ShardingError(
            f"mesh with axis {name!r}",
            rule=f"the axes are {', '.join(AXES)}",
            fix="pipeline (pp) and expert (ep) parallelism are out of scope; fold their ranks into dp",
        )
    world = dist.get_world_size() if dist.is_initialized() and not alone else 1
    sizes = {"dp": dp, "cp": cp, "tp": tp}
    requested = dp * cp * tp
    if requested != world:
        raise ShardingError(
            f"mesh dp={dp} x cp={cp} x tp={tp} = {requested} ranks",
            found=f"a job of {world} rank(s)",
            rule="dp * cp * tp is the number of ranks",
            fix=f"start {requested} ranks, or choose sizes whose product is {world}",
        )
    if ulysses < 1 or cp % ulysses:
        raise ShardingError(
            f"mesh with cp={cp} and ulysses={ulysses}",
            rule="ulysses divides cp",
            fix="choose a divisor of cp as the number of neighbours that exchange heads",
        )
    device = torch.device(device)
    if world == 1:
        return single_process_mesh(device)
    with flight.entering("make_mesh", "world", range(world), "world", tuple(sizes.values())):
        device_mesh = init_device_mesh(device.type, (dp, cp, tp), mesh_dim_names=AXES)
        coordinate = dict(zip(AXES, device_mesh.get_coordinate(), strict=True))
        axes = {
            name: _axis(name, size, coordinate[name], device_mesh.get_group(name) if size > 1 else None)
            for name, size in sizes.items()
        }
        flat_size = dp * cp
        flat_rank = coordinate["dp"] * cp + coordinate["cp"]
        if dp == 1 or cp == 1:
            group = axes["dp"].group or axes["cp"].group
        else:
            group = _flattened_group(dp, cp, tp)
        axes["dp_cp"] = _axis("dp_cp", flat_size, flat_rank, group)
        axes |= _inner_and_outer(axes["cp"], dp, tp, ulysses)
    return Mesh(axes, device)


def _axis(name: str, size: int, rank: int, group: dist.ProcessGroup | None) -> Axis:
    ranks = () if group is None else flight.compact(dist.get_process_group_ranks(group))
    return Axis(name, size, rank, group, ranks)


def _inner_and_outer(axis: Axis, dp: int, tp: int, inner: int) -> dict[str, Axis]:
    """cp_inner and cp_outer of this rank, created in the same order on every rank; all of cp reuses its group."""
    outer = axis.size // inner
    sizes = {"cp_inner": inner, "cp_outer": outer}
    ranks = {"cp_inner": axis.rank % inner, "cp_outer": axis.rank // inner}
    groups = {name: axis.group if size == axis.size else None for name, size in sizes.items()}
    if 1 < inner < axis.size:
        grid = torch.arange(dp * axis.size * tp).view(dp, outer, inner, tp)
        for name, lines in (("cp_inner", grid.movedim(2, -1)), ("cp_outer", grid.movedim(1, -1))):
            for line in lines.flatten(0, -2).tolist():
                group = dist.new_group(line)
                if dist.get_rank() in line:
                    groups[name] = group
    return {name: _axis(name, sizes[name], ranks[name], groups[name]) for name in sizes}


def _flattened_group(dp: int, cp: int, tp: int) -> dist.ProcessGroup:
    """The group of ranks with this rank's tp coordinate; created in the same order on every rank."""
    ranks = torch.arange(dp * cp * tp).view(dp * cp, tp)
    local_group = None
    for column in range(tp):
        group = dist.new_group(ranks[:, column].tolist())
        if dist.get_rank() % tp == column:
            local_group = group
    assert local_group is not None, "every rank has a tp coordinate"
    return local_group


def join(device_type: str, *, timeout_s: float) -> torch.device:
    """Join the job that this process was started in, and return this rank's device.

    Reads RANK, WORLD_SIZE and LOCAL_RANK as every launcher of torch sets them; a process without them is a
    job of one rank and joins nothing. A collective that waits longer than ``timeout_s`` fails.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        with flight.entering("join", "world", range(world), "world"):
            dist.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                timeout=datetime.timedelta(seconds=timeout_s),
                device_id=device if device_type == "cuda" else None,
            )
    return device


def leave() -> None:
    """Leave the job; a no-op if none was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
