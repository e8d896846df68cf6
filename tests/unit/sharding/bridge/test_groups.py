"""Groups of grids: one for each set of lines, made once by all, looked up by each. Real ones: tests/parity."""

import pytest
import torch

from workbench.errors import ShardingError
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.bridge.groups import GridGroups
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

GRID = Grid.of(tp=2, cp=2, dp=2)


def on_ranks(function, ranks=8):
    return simulate(lambda mesh: function(GridGroups(mesh["dp"])), dp=ranks)


def test_an_axis_has_the_ranks_of_its_line():
    def sums(groups):
        axis = groups.make(GRID, "cp")
        return tuple(axis.ranks), axis.rank, float(all_sum(torch.tensor(10.0**groups.rank), axis))

    by_rank = on_ranks(sums)
    for rank, (ranks, place, total) in enumerate(by_rank):
        assert (ranks, place) == (GRID.lines("cp")[[0, 1, 0, 1, 2, 3, 2, 3][rank]], rank // 2 % 2)
        assert total == sum(10.0**other for other in ranks)


def test_the_mesh_of_a_grid_matches_make_mesh():
    def places(mesh):
        return {name: (axis.size, axis.rank, tuple(axis.ranks)) for name, axis in mesh.axes.items()}

    laid = simulate(places, tp=2, cp=2, dp=2)
    assert on_ranks(lambda groups: places(groups.mesh(GRID))) == laid


def test_the_same_lines_have_the_same_group():
    def groups_of(groups):
        mesh = groups.mesh(GRID)
        other = groups.ensure("gather", GRID.lines("cp"))
        return other.group is mesh["cp"].group, other.name, groups.get(GRID, "dp", "cp").group is mesh["dp_cp"].group

    assert set(on_ranks(groups_of)) == {(True, "gather", True)}


def test_one_group_of_all_is_the_world():
    assert all(on_ranks(lambda groups: groups.make(Grid.of(dp=4), "dp").group is groups.world.group, 4))


def test_a_grid_may_leave_ranks_out():
    def axes(groups):
        axis = groups.make(Grid.of(tp=2, dp=2, offset=1), "tp")
        return axis.size, tuple(axis.ranks)

    assert on_ranks(axes, 6) == [(1, ()), (2, (1, 2)), (2, (1, 2)), (2, (3, 4)), (2, (3, 4)), (1, ())]


def twice(groups):
    groups.make(GRID, "cp")
    groups.make(GRID, "cp")


def after_destroy(groups):
    groups.make(GRID, "cp")
    groups.destroy()
    groups.destroy()
    groups.get(GRID, "cp")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (twice, "exist already"),
        (lambda groups: groups.get(GRID, "cp"), r"groups.make\(grid, 'cp'\) on every rank"),
        (after_destroy, "the cp group of"),
        (lambda groups: groups.make(Grid.of(tp=2, dp=5), "tp"), r"a job of 8 rank\(s\)"),
        (lambda groups: groups.make_lines("odd", [(0, 1), (1, 2)]), "in at most one of them"),
        (lambda groups: groups.mesh(Grid.of(dp=4)), "coordinates of rank"),
    ],
)
def test_user_errors_are_refused(wrong, words):
    with pytest.raises(ShardingError, match=words):
        on_ranks(wrong)


def test_one_process_needs_no_groups():
    groups = GridGroups(Axis("world"))
    assert groups.mesh(Grid.of())["dp_cp"].group is None
    assert repr(groups) == "GridGroups(rank 0 of 1; ((0,),))"
