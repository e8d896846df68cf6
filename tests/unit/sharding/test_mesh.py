from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from workbench.errors import ShardingError
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis, axes_of, axis_of, device_mesh_of, make_mesh, ranks_of, single_process_mesh


def test_one_rank_needs_no_rendezvous():
    mesh = single_process_mesh()
    assert (mesh.world_size, mesh.is_first, mesh.coordinates) == (1, True, {"dp": 0, "cp": 0, "tp": 0})
    assert {mesh[name].group for name in ("dp_cp", "cp_inner", "cp_outer")} == {None}


def test_a_mesh_larger_than_the_job_is_refused():
    with pytest.raises(ShardingError) as caught:
        make_mesh(dp=2, cp=2)
    assert str(caught.value) == (
        "mesh dp=2 x cp=2 x tp=1 = 4 ranks\n"
        "  found: a job of 1 rank(s)\n"
        "  rule: pp * dp * cp * tp is the number of ranks\n"
        "  do: start 4 ranks, or choose sizes whose product is 1"
    )


def test_a_mesh_of_more_pipeline_ranks_than_the_job_is_refused():
    with pytest.raises(ShardingError, match=r"mesh pp=2 x dp=1 x cp=1 x tp=1 = 2 ranks"):
        make_mesh(pp=2)


def test_ranks_that_share_experts_divide_those_of_dp_and_cp():
    with pytest.raises(ShardingError, match=r"ep divides dp \* cp"):
        make_mesh(ep=2)


def places():
    import torch
    import torch.distributed as dist

    mesh = make_mesh(dp=2, cp=1, tp=2)
    one = torch.tensor([float(2 ** dist.get_rank())])
    sums = {name: float(all_sum(one, mesh[name])) for name in ("dp", "cp", "tp", "dp_cp")}
    cubes = make_mesh(dp=2, cp=2, tp=1)
    return mesh.coordinates, sums, float(all_sum(one, cubes["dp_cp"])), cubes["dp_cp"].rank


def places_in_stages():
    import torch
    import torch.distributed as dist

    mesh = make_mesh(pp=2, dp=2, cp=1, tp=2)
    one = torch.tensor([float(2 ** dist.get_rank())])
    split = make_mesh(pp=2, dp=1, cp=4, ulysses=2, ep=2)
    names = ("pp", "dp", "tp", "dp_cp"), ("cp_inner", "cp_outer", "ep", "edp", "dp_cp")
    sums = [
        {name: float(all_sum(one, each[name])) for name in of} for each, of in zip((mesh, split), names, strict=True)
    ]
    return mesh.coordinates, mesh.world_size, mesh.is_first, *sums


def test_axes_of_a_pipeline_join_the_right_ranks(tmp_path):
    """Rank r contributes 2 ** r; the stage is slowest."""
    answers = run_ranks(places_in_stages, 8, tmp_path)

    def total(ranks):
        return float(sum(2**rank for rank in ranks))

    for rank, (coordinates, size, first, sums, split) in enumerate(answers):
        stage, within = divmod(rank, 4)
        assert (coordinates, size, first) == ({"pp": stage, "dp": within // 2, "cp": 0, "tp": within % 2}, 8, rank == 0)
        base = 4 * stage
        data = total(base + within % 2 + 2 * each for each in range(2))
        assert sums == {
            "pp": total([within, within + 4]),
            "dp": data,
            "tp": total(base + within // 2 * 2 + each for each in range(2)),
            "dp_cp": data,
        }
        neighbours = total(base + within // 2 * 2 + each for each in range(2))
        apart = total(base + within % 2 + 2 * each for each in range(2))
        assert split == {
            "cp_inner": neighbours,
            "cp_outer": apart,
            "ep": neighbours,
            "edp": apart,
            "dp_cp": total(range(base, base + 4)),
        }


def test_axes_join_the_right_ranks(tmp_path):
    answers = run_ranks(places, 4, tmp_path)
    assert [a[0] for a in answers] == [{"dp": d, "cp": 0, "tp": t} for d in (0, 1) for t in (0, 1)]
    # Rank r contributes 2 ** r; tp joins 0,1 and 2,3; dp joins 0,2 and 1,3; cp of size 1 joins no ranks.
    assert [a[1] for a in answers] == [
        {"dp": 5, "cp": 1, "tp": 3, "dp_cp": 5},
        {"dp": 10, "cp": 2, "tp": 3, "dp_cp": 10},
        {"dp": 5, "cp": 4, "tp": 12, "dp_cp": 5},
        {"dp": 10, "cp": 8, "tp": 12, "dp_cp": 10},
    ]
    assert [a[2] for a in answers] == [15.0] * 4
    assert [a[3] for a in answers] == [0, 1, 2, 3]


def test_neighbours_that_do_not_divide_cp_are_refused():
    with pytest.raises(ShardingError, match="ulysses divides cp"):
        make_mesh(ulysses=2)


def sums_over_parts_of_cp(sizes):
    import torch
    import torch.distributed as dist

    one, result = torch.tensor([float(2 ** dist.get_rank())]), []
    for more in sizes:
        mesh = make_mesh(**more)
        result.append(
            [
                (float(all_sum(one, axis)), axis.rank, axis.size, tuple(axis.ranks))
                for axis in (mesh["cp_inner"], mesh["cp_outer"])
            ]
        )
    return result


def test_cp_is_cut_into_neighbours_and_the_ranks_at_their_places(tmp_path):
    sizes = [{"cp": 4, "ulysses": 2}, {"cp": 4, "ulysses": 4}, {"cp": 4}, {"dp": 2, "cp": 2, "ulysses": 2}]
    answers = run_ranks(sums_over_parts_of_cp, 4, tmp_path, sizes)
    assert [a[0] for a in answers] == [
        [(3, 0, 2, (0, 1)), (5, 0, 2, (0, 2))],
        [(3, 1, 2, (0, 1)), (10, 0, 2, (1, 3))],
        [(12, 0, 2, (2, 3)), (5, 1, 2, (0, 2))],
        [(12, 1, 2, (2, 3)), (10, 1, 2, (1, 3))],
    ]
    whole = [(15, rank, 4, (0, 1, 2, 3)) for rank in range(4)]
    assert [a[1] for a in answers] == [[all_of_cp, (2**rank, 0, 1, ())] for rank, all_of_cp in enumerate(whole)]
    assert [a[2] for a in answers] == [[(2**rank, 0, 1, ()), all_of_cp] for rank, all_of_cp in enumerate(whole)]
    assert [a[3][0][0] for a in answers] == [3, 3, 12, 12]


def sum_over_dp_cp():
    import torch
    import torch.distributed as dist

    mesh = make_mesh(dp=1, cp=4, tp=2, ulysses=2)
    parts = [tuple(mesh[name].ranks) for name in ("cp_inner", "cp_outer")]
    mesh = make_mesh(dp=2, cp=2, tp=2)
    return float(all_sum(torch.tensor([float(2 ** dist.get_rank())]), mesh["dp_cp"])), parts


def test_the_flattened_axis_joins_ranks_of_one_tp_coordinate(tmp_path):
    # Ranks 0, 2, 4, 6 have the first slice, 1, 3, 5, 7 the second; neighbours have different slices.
    answers = run_ranks(sum_over_dp_cp, 8, tmp_path)
    assert [total for total, _ in answers] == [85.0, 170.0] * 4
    # cp of four on every second rank: neighbours are two ranks away, with positions four tokens away.
    assert [parts for _, parts in answers] == [
        [(first, first + 2), (place, place + 4)]
        for first, place in ((0, 0), (1, 1), (0, 2), (1, 3), (4, 0), (5, 1), (4, 2), (5, 3))
    ]


def on_a_rank():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    rank = dist.get_rank()
    texts = []
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
            texts.append(str(error))
    cp, dp = axes_of(mesh)
    over = device_mesh_of(cp, "cpu")
    return {
        "cp": (cp.size, cp.rank, list(cp.ranks)),
        "dp": [(a.name, a.size, a.rank) for a in dp],
        "said": texts,
        "ranks": ranks_of((cp, *dp)),
        "group": axis_of(pairs[rank // 2], "x").rank,
        "mesh": (over.ndim, over.size(), over.get_local_rank()),
    }


def test_axes_are_read_off_meshes_and_groups(tmp_path):
    for rank, result in enumerate(run_ranks(on_a_rank, 4, tmp_path)):
        assert result["cp"] == (2, rank % 2, [rank // 2 * 2, rank // 2 * 2 + 1])
        assert result["dp"] == [("dp_replicate", 2, rank // 2), ("dp_shard", 1, 0)]
        assert (result["ranks"], result["group"], result["mesh"]) == (4, rank % 2, (1, 2, rank % 2))
        words = (
            "dimensions dp, tp",
            "without names",
            "dimensions dp_shard_cp",
            "a device mesh of 3 dimensions",
            "which this rank is not in",
        )
        assert len(result["said"]) == len(words)
        assert all(word in text for word, text in zip(words, result["said"], strict=True))


def test_without_ranks_there_is_no_group():
    assert axis_of(None, "cp") == Axis("cp")
    assert axis_of(Axis("x", 2), "cp") == Axis("x", 2)
    mesh = single_process_mesh()
    assert axes_of(mesh) == (mesh["cp"], (mesh["dp"],))
    assert ranks_of((Axis("a", 3), Axis("b", 2))) == 6
    with pytest.raises(ShardingError, match="without a process group"):
        device_mesh_of(Axis("cp"), "cpu")
