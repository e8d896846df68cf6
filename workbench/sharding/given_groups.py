"""Axes over process groups and device meshes that somebody else made: a trainer has its own.

The only place that asks such a group who is in it. `workbench.sharding.mesh` makes groups of our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from workbench.errors import ShardingError
from workbench.sharding.mesh import Axis, Mesh

GivenGroup = Axis | dist.ProcessGroup | DeviceMesh
"""One axis as a trainer knows it: ours, a process group, or a device mesh of one dimension."""

GivenMesh = Mesh | DeviceMesh
"""All axes at once."""


def axis_of(given: GivenGroup | None, name: str) -> Axis:
    """The axis of a group that exists already. No collective.

    Args:
        given: the group; None: no group, an axis of one rank.
        name: what the axis is called in messages and flight records.

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
                fix=f'take one of them (mesh["{name}"]), or flatten them where they were made',
            )
        given = given.get_group()
    if not isinstance(given, dist.ProcessGroup) or dist.get_rank(given) < 0:
        raise ShardingError(
            f"axis {name}",
            found=f"{type(given).__name__}, which this rank is not in",
            rule="every rank gives the group that it is a member of",
            fix="make the groups on all ranks, and keep the one that has this rank",
        )
    size = dist.get_world_size(given)
    if size == 1:
        return Axis(name)
    return Axis(name, size, dist.get_rank(given), given, dist.get_process_group_ranks(given))


def world_axis() -> Axis:
    """All ranks of the job that this process has joined; an axis of one where it joined none. No collective."""
    return axis_of(dist.group.WORLD if dist.is_initialized() else None, "world")


def axes_of(mesh: GivenMesh) -> tuple[Axis, tuple[Axis, ...]]:
    """The context-parallel axis of a mesh, and its data-parallel ones.

    Args:
        mesh: one of ours; or a device mesh whose dimensions are called "cp" and "dp", "dp_..." (either may be absent).

    Raises:
        ShardingError: a device mesh with other names, whose meaning nobody here knows.
    """
    if isinstance(mesh, Mesh):
        return mesh["cp"], (mesh["dp"],)
    names = mesh.mesh_dim_names or ()
    strangers = [name for name in names if name != "cp" and (name.split("_")[0] != "dp" or "cp" in name.split("_"))]
    if strangers or not names:
        raise ShardingError(
            "axes of a device mesh",
            found=f"dimensions {', '.join(names) or 'without names'}",
            rule='its dimensions are "cp" and "dp" (or "dp_..."); a tp rank holds the same tokens as '
            "its neighbours and takes no part, and a dimension of both dp and cp does not say who "
            "shares rows",
            fix='slice the mesh (mesh["dp", "cp"]), or give cp= and dp= by themselves',
        )
    return (
        axis_of(mesh["cp"] if "cp" in names else None, "cp"),
        tuple(axis_of(mesh[name], name) for name in names if name != "cp"),
    )


def device_mesh_of(axis: Axis, device_type: str) -> DeviceMesh:
    """An axis as `torch` takes it: a device mesh of one dimension over the axis' own group.

    Raises:
        ShardingError: an axis without a process group.
    """
    if not isinstance(axis.group, dist.ProcessGroup):
        raise ShardingError(
            f"device mesh of axis {axis.name}",
            found=f"{axis.size} rank(s) without a process group",
            rule="torch's own code talks over a process group",
            fix="start one process a rank",
        )
    return DeviceMesh.from_group(axis.group, device_type, mesh_dim_names=(axis.name,))


def ranks_of(axes: Sequence[Axis]) -> int:
    """How many ranks some axes lie over."""
    total = 1
    for axis in axes:
        total *= axis.size
    return total
