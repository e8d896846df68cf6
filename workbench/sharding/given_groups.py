"""Axes over the process groups and device meshes of an external trainer.

The only module that reads the ranks of such a group. `workbench.sharding.mesh` creates the workbench's own groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from workbench.errors import ShardingError
from workbench.sharding.mesh import Axis, Mesh

GivenGroup = Axis | dist.ProcessGroup | DeviceMesh
"""One axis of a trainer: a workbench axis, a process group, or a device mesh of one dimension."""

GivenMesh = Mesh | DeviceMesh
"""All axes at once."""


def axis_of(given: GivenGroup | None, name: str) -> Axis:
    """Return the axis of an existing group. No collective.

    Args:
        given: the group; None: no group, an axis of one rank.
        name: name of the axis in messages and flight records.

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

    Args:
        mesh: a workbench mesh; or a device mesh with dimensions "cp" and "dp", "dp_..." (either may be absent).

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
            "and do not count, and a dimension of both dp and cp does not tell which ranks "
            "share rows",
            fix='slice the mesh (mesh["dp", "cp"]), or pass cp= and dp= separately',
        )
    return (
        axis_of(mesh["cp"] if "cp" in names else None, "cp"),
        tuple(axis_of(mesh[name], name) for name in names if name != "cp"),
    )


def device_mesh_of(axis: Axis, device_type: str) -> DeviceMesh:
    """Return a one-dimensional device mesh over the axis's own group, as torch's APIs take it.

    Raises:
        ShardingError: an axis without a process group.
    """
    if not isinstance(axis.group, dist.ProcessGroup):
        raise ShardingError(
            f"device mesh of axis {axis.name}",
            found=f"{axis.size} rank(s) without a process group",
            rule="torch's own code needs a process group",
            fix="start one process per rank",
        )
    return DeviceMesh.from_group(axis.group, device_type, mesh_dim_names=(axis.name,))


def ranks_of(axes: Sequence[Axis]) -> int:
    """Number of ranks spanned by several axes."""
    total = 1
    for axis in axes:
        total *= axis.size
    return total
