"""Axes over groups that a trainer made: who is in them, and what is refused."""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError
from workbench.sharding.given_groups import axes_of, axis_of, device_mesh_of, ranks_of
from workbench.sharding.mesh import Axis, single_process_mesh


def on_a_rank():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    rank = dist.get_rank()
    said = []
    strangers = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mixed = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard_cp",))
    nameless = init_device_mesh("cpu", (4,))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    other = pairs[1 - rank // 2]
    for attempt in (
        lambda: axes_of(strangers),
        lambda: axes_of(nameless),
        lambda: axes_of(mixed),
        lambda: axis_of(mesh, "cp"),
        lambda: axis_of(other, "cp"),
    ):
        try:
            attempt()
        except ShardingError as error:
            said.append(str(error))
    cp, dp = axes_of(mesh)
    over = device_mesh_of(cp, "cpu")
    return {
        "cp": (cp.size, cp.rank, list(cp.ranks)),
        "dp": [(a.name, a.size, a.rank) for a in dp],
        "said": said,
        "ranks": ranks_of((cp, *dp)),
        "group": axis_of(pairs[rank // 2], "x").rank,
        "mesh": (over.ndim, over.size(), over.get_local_rank()),
    }


def test_axes_are_read_off_meshes_and_groups(tmp_path):
    for rank, found in enumerate(run_ranks(on_a_rank, 4, tmp_path)):
        assert found["cp"] == (2, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1])
        assert found["dp"] == [("dp_replicate", 2, rank // 2), ("dp_shard", 1, 0)]
        assert (found["ranks"], found["group"], found["mesh"]) == (4, rank % 2, (1, 2, rank % 2))
        words = (
            "dimensions dp, tp",
            "without names",
            "dimensions dp_shard_cp",
            "a device mesh of 3 dimensions",
            "which this rank is not in",
        )
        assert len(found["said"]) == len(words)
        assert all(word in said for word, said in zip(words, found["said"], strict=True))


def test_without_ranks_there_is_no_group():
    assert axis_of(None, "cp") == Axis("cp")
    assert axis_of(Axis("x", 2), "cp") == Axis("x", 2)
    mesh = single_process_mesh()
    assert axes_of(mesh) == (mesh["cp"], (mesh["dp"],))
    assert ranks_of((Axis("a", 3), Axis("b", 2))) == 6
    with pytest.raises(ShardingError, match="without a process group"):
        device_mesh_of(Axis("cp"), "cpu")
