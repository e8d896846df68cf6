"""The mesh: named axes pp, dp, cp and tp over the ranks of a job, and ep over those of dp x cp.

tp varies fastest, then cp, then dp, then pp: ranks that communicate most are neighbours. ep takes neighbours among
dp x cp. An axis of size 1 has no process group, so a single process needs no rendezvous. `axis_of` and `axes_of` read
the groups and device meshes of an external trainer.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workbench.errors import ShardingError
from workbench.sharding import flight
from workbench.sharding.wire import Group

AXES = ("pp", "dp", "cp", "tp")
SPLITS = ("cp_inner", "cp_outer", "ep", "edp", "shard", "replica")
"""Axes that are parts of cp, and of dp x cp."""


@dataclass(frozen=True)
class Axis:
    """One named axis, with this rank's coordinate.

    Attributes:
        name: one of `Mesh`, or another for groups of a trainer or a bridge.
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
        axes: pp, dp, cp, tp; the flattened dp_cp, over which gradients are summed; and cp split in two for hybrid
            attention: cp_inner, neighbours on cp, varies fastest; cp_outer, ranks with the same cp_inner coordinate;
            and dp_cp split in two for experts: ep, neighbours, and edp, ranks with the same experts; and for sharded
            parameters: shard, neighbours that share one copy, and replica, ranks with the same part of it.
        device: of this rank.
    """

    axes: Mapping[str, Axis]
    device: torch.device

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name]

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinates, axis -> coordinate; pp only where there are several stages."""
        return {name: self.axes[name].rank for name in AXES if name != "pp" or self.axes[name].size > 1}

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return ranks_of([self[name] for name in AXES])

    @property
    def is_first(self) -> bool:
        """True if this is the rank that writes records."""
        return not any(self.coordinates.values())


def single_process_mesh(device: torch.device | str = "cpu") -> Mesh:
    """The mesh of one rank."""
    return Mesh({name: Axis(name) for name in (*AXES, "dp_cp", *SPLITS)}, torch.device(device))


def make_mesh(
    *,
    dp: int = 1,
    cp: int = 1,
    tp: int = 1,
    ulysses: int = 1,
    ep: int = 1,
    shard: int = 0,
    pp: int = 1,
    device: torch.device | str = "cpu",
    alone: bool = False,
) -> Mesh:
    """Create named axes over the ranks of the running job, or over this process alone.

    Collective unless ``alone``, which treats this process as the whole job: every rank calls it with the same sizes.
    Call `join` first if there is more than one rank. ``pp`` is the number of pipeline ranks, ``ulysses`` the size of
    cp_inner, neighbours on cp; ``ep`` is that of the ranks that share experts, neighbours among those of dp x cp, and
    ``shard`` that of the ranks that share one copy of sharded parameters, likewise; 0: all of dp x cp.

    Raises:
        ShardingError: sizes whose product is not the world size.
    """
    world = dist.get_world_size() if dist.is_initialized() and not alone else 1
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    requested = pp * dp * cp * tp
    if requested != world:
        stages = f"pp={pp} x " if pp > 1 else ""
        raise ShardingError(
            f"mesh {stages}dp={dp} x cp={cp} x tp={tp} = {requested} ranks",
            found=f"a job of {world} rank(s)",
            rule="pp * dp * cp * tp is the number of ranks",
            fix=f"start {requested} ranks, or choose sizes whose product is {world}",
        )
    check_ulysses(f"mesh with cp={cp} and ulysses={ulysses}", cp, ulysses)
    check_ep(f"mesh with dp={dp} x cp={cp} and ep={ep}", dp * cp, ep)
    check_shard(f"mesh with dp={dp} x cp={cp} and shard={shard}", dp * cp, shard)
    device = torch.device(device)
    if world == 1:
        return single_process_mesh(device)
    with flight.entering("make_mesh", "world", range(world), "world", tuple(sizes.values())):
        several = {name: size for name, size in sizes.items() if size > 1}  # each group of gloo polls its sockets
        device_mesh = init_device_mesh(device.type, tuple(several.values()), mesh_dim_names=tuple(several))
        coordinates = device_mesh.get_coordinate()
        assert coordinates is not None, "the mesh has every rank of the job"
        coordinate = dict.fromkeys(AXES, 0) | dict(zip(several, coordinates, strict=True))
        axes = {
            name: _axis(name, size, coordinate[name], device_mesh.get_group(name) if size > 1 else None)
            for name, size in sizes.items()
        }
        if dp == 1 or cp == 1:
            axes["dp_cp"] = replace(axes["cp" if dp == 1 else "dp"], name="dp_cp")
        else:
            group = _group_among(torch.arange(world).view(pp, dp * cp, tp).mT)
            axes["dp_cp"] = _axis("dp_cp", dp * cp, coordinate["dp"] * cp + coordinate["cp"], group)
        axes |= _split(axes["cp"], ("cp_inner", "cp_outer"), (pp * dp, tp), ulysses)
        axes |= _split(axes["dp_cp"], ("ep", "edp"), (pp, tp), ep)
        axes |= _split(axes["dp_cp"], ("shard", "replica"), (pp, tp), shard or dp * cp)
    return Mesh(axes, device)


def undivided(axes: Mapping[str, Axis]) -> dict[str, Axis]:
    """The parts of cp and of dp x cp (`SPLITS`) where neither is divided, and a pipeline of one stage.

    One part has one rank, the other all.
    """
    whole = {"cp_outer": "cp", "edp": "dp_cp", "shard": "dp_cp"}
    return {name: replace(axes[whole[name]], name=name) if name in whole else Axis(name) for name in ("pp", *SPLITS)}


def check_ep(requested: str, dp_cp: int, ep: int) -> None:
    """Raise if the ranks of dp x cp cannot be split into neighbours of this number."""
    if ep < 1 or dp_cp % ep:
        raise ShardingError(
            requested,
            rule="ep divides dp * cp: experts are shared by ranks that have different tokens",
            fix="choose a divisor of dp * cp",
        )


def check_shard(requested: str, dp_cp: int, shard: int) -> None:
    """Raise if the ranks of dp x cp cannot be split into copies of so many neighbours (0: one copy)."""
    if shard < 0 or (shard and dp_cp % shard):
        raise ShardingError(
            requested,
            rule="shard divides dp * cp: each copy of the parameters is sharded over as many ranks",
            fix="choose a divisor of dp * cp, or leave it out for one copy",
        )


def check_ulysses(requested: str, cp: int, ulysses: int) -> None:
    """Raise if cp cannot be split into neighbours of this number."""
    if ulysses < 1 or cp % ulysses:
        raise ShardingError(
            requested,
            rule="ulysses divides cp",
            fix="choose a divisor of cp as the number of neighbours that exchange heads",
        )


def _axis(name: str, size: int, rank: int, group: dist.ProcessGroup | None) -> Axis:
    ranks = () if group is None else flight.compact(dist.get_process_group_ranks(group))
    return Axis(name, size, rank, group, ranks)


def _split(axis: Axis, names: tuple[str, str], around: tuple[int, int], inner: int) -> dict[str, Axis]:
    """Two parts of an axis, neighbours and ranks with the same place among them; one that is all of it has its group.

    Groups are created in the same order on every rank. ``around`` are the numbers of ranks of slower and faster axes.
    """
    outer, (slower, faster) = axis.size // inner, around
    grid = torch.arange(slower * axis.size * faster).view(slower, outer, inner, faster)
    axes = {}
    for name, size, rank, dim in ((names[0], inner, axis.rank % inner, 2), (names[1], outer, axis.rank // inner, 1)):
        if size == axis.size:
            axes[name] = replace(axis, name=name)
        else:
            axes[name] = _axis(name, size, rank, _group_among(grid.movedim(dim, -1)) if size > 1 else None)
    return axes


def _group_among(lines: torch.Tensor) -> dist.ProcessGroup | None:
    """This rank's group, of those of all lines along the last dimension; created in the same order on every rank."""
    local_group = None
    for line in lines.flatten(0, -2).tolist():
        group = dist.new_group(line)
        if dist.get_rank() in line:
            local_group = group
    return local_group


_job_store: dist.Store | None = None
_joined: list[str] = []  # names under which this process has joined its job


def job_store(*, timeout_s: float, prefix: str = "") -> dist.Store | None:
    """Return the key-value store of the job that this process was started in; None in a job of one rank.

    With a prefix its keys are apart from all others.

    Reads MASTER_ADDR and the other variables of torch's launchers, once: a job has one store for all that it executes.
    A get that waits longer than ``timeout_s`` fails.
    """
    global _job_store
    timeout = datetime.timedelta(seconds=timeout_s)
    if _job_store is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _job_store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if _job_store is not None:
        _job_store.set_timeout(timeout)
    return dist.PrefixStore(prefix, _job_store) if prefix and _job_store is not None else _job_store


def join(device_type: str, *, timeout_s: float, name: str = "") -> torch.device:
    """Join the job that this process was started in, and return this rank's device.

    Reads RANK, WORLD_SIZE and LOCAL_RANK as every launcher of torch sets them; without them the job is one rank, which
    joins nothing. A collective that waits longer than ``timeout_s`` fails. Processes that join, `leave` and join again
    use another ``name`` each time: keys of earlier process groups stay in the job's store.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        with flight.entering("join", "world", range(world), "world"):
            store = job_store(timeout_s=timeout_s)
            assert store is not None, "a job of several ranks has a store"
            dist.init_process_group(
                "nccl" if device_type == "cuda" else "gloo",
                store=dist.PrefixStore(name, store),
                rank=int(os.environ["RANK"]),
                world_size=world,
                timeout=datetime.timedelta(seconds=timeout_s),
                # a second time torch 2.11's device mesh would split a group of NCCL that is gone, and crash
                device_id=device if device_type == "cuda" and not _joined else None,
            )
        _joined.append(name)
    return device


def leave() -> None:
    """Leave the job; a no-op if none was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


GivenGroup = Axis | dist.ProcessGroup | DeviceMesh
"""One axis of a trainer: a workbench axis, a process group, or a device mesh of one dimension."""

GivenMesh = Mesh | DeviceMesh
"""All axes at once."""


def axis_of(given: GivenGroup | None, name: str) -> Axis:
    """Return the axis of an existing group, or of one rank for None; named in messages and records. No collective.

    Raises:
        ShardingError: a device mesh of several dimensions, or a group that this rank is not in.
    """
    if given is None:
        return Axis(name)
    if isinstance(given, Axis):
        return given
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ShardingError(
                f"axis {name}",
                found=f"a device mesh of {given.ndim} dimensions",
                rule="an axis is one dimension",
                fix=f'select one of them (mesh["{name}"]), or flatten them where they are created',
            )
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup) or dist.get_rank(given) < 0:
        raise ShardingError(
            f"axis {name}",
            found=f"{type(given).__name__}, which this rank is not in",
            rule="every rank passes the group that it is a member of",
            fix="create the groups on all ranks, and pass the one that contains this rank",
        )
    size = dist.get_world_size(given)
    if size == 1:
        return Axis(name)
    return Axis(name, size, dist.get_rank(given), given, dist.get_process_group_ranks(given))


def world_axis() -> Axis:
    """All ranks of this process's job; an axis of one rank outside a job. No collective."""
    return axis_of(dist.group.WORLD if dist.is_initialized() else None, "world")


def axes_of(mesh: GivenMesh) -> tuple[Axis, tuple[Axis, ...]]:
    """Return the context-parallel axis of a mesh and its data-parallel axes.

    A device mesh has dimensions "cp" and "dp", "dp_..."; either may be absent.

    Raises:
        ShardingError: a device mesh with other, unknown dimension names.
    """
    if isinstance(mesh, Mesh):
        return mesh["cp"], (mesh["dp"],)
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name != "cp" and (name.split("_")[0] != "dp" or "cp" in name.split("_"))]
    if unknown or not names:
        raise ShardingError(
            "axes of a device mesh",
            found=f"dimensions {', '.join(names) or 'without names'}",
            rule='its dimensions are "cp" and "dp" (or "dp_..."); tp ranks hold the same tokens '
            "and pp ranks other layers, and do not count; a dimension of both dp and cp does not tell which "
            "ranks share rows",
            fix='slice the mesh (mesh["dp", "cp"]), or pass cp= and dp= separately',
        )
    dp = tuple(axis_of(mesh[name], name) for name in names if name != "cp")
    return axis_of(mesh["cp"] if "cp" in names else None, "cp"), dp


def device_mesh_of(axis: Axis, device_type: str) -> DeviceMesh:
    """Return a device mesh over the axis's own process group, as torch's APIs take it; without one raise an error."""
    if not isinstance(axis.group, dist.ProcessGroup):
        raise ShardingError(
            f"device mesh of axis {axis.name}",
            found=f"{axis.size} rank(s) without a process group",
            rule="torch's own code needs a process group",
            fix="start one process per rank",
        )
    return DeviceMesh.from_group(axis.group, device_type, mesh_dim_names=(axis.name,))


def alone_on(axis: Axis) -> Axis:
    """Return an axis of one rank with a process group, which torch's own code needs. Collective over the job."""
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]  # each is created on every rank
    return replace(axis, group=cast(Group, groups[rank]), ranks=(rank,))


def ranks_of(axes: Sequence[Axis]) -> int:
    """Number of ranks spanned by several axes."""
    return math.prod(axis.size for axis in axes)
