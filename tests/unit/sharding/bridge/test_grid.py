"""A grid against its own enumeration by loops, in every order of the dimensions, and words for what is no grid."""

import itertools

import pytest

from workbench.errors import ShardingError
from workbench.sharding.bridge.grid import Grid


@pytest.mark.parametrize("names", list(itertools.permutations(("tp", "cp", "dp"))))
@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 2, 2), (3, 1, 1)])
def test_places_are_counted_with_the_first_dimension_fastest(names, sizes):
    grid = Grid(names, sizes, 5)
    slowest_first = itertools.product(*(range(size) for size in reversed(sizes)))
    for rank, at in enumerate(slowest_first, 5):
        assert list(grid.coordinates(rank).values()) == list(reversed(at))
        assert grid.rank_at(**grid.coordinates(rank)) == rank
    assert grid.ranks == range(5, 5 + grid.size)


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (("tp",), ((0, 1), (2, 3), (4, 5), (6, 7))),
        (("cp",), ((0, 2), (1, 3), (4, 6), (5, 7))),
        (("dp",), ((0, 4), (1, 5), (2, 6), (3, 7))),
        (("dp", "cp"), ((0, 2, 4, 6), (1, 3, 5, 7))),
        (("pp",), tuple((rank,) for rank in range(8))),
    ],
)
def test_lines_are_those_of_the_field(names, lines):
    assert Grid(("tp", "cp", "pp", "dp"), (2, 2, 1, 2)).lines(*names) == lines
    shifted = tuple(tuple(rank + 4 for rank in line) for line in lines)
    assert Grid.of(tp=2, cp=2, dp=2, offset=4).lines(*names) == shifted


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grid(("cp", "dp"), (2, 2)), "no tp"),
        (lambda: Grid(("tp", "cp"), (2, 2)), "no dp"),
        (lambda: Grid(("tp", "tp", "dp"), (2, 2, 2)), "each named once"),
        (lambda: Grid(("tp", "dp"), (2,)), "2 names, 2 of them different, and 1 sizes"),
        (lambda: Grid(("tp", "dp", "ep"), (2, 2, 2)), "dimension ep"),
        (lambda: Grid.of(tp=0), "every size is at least 1"),
        (lambda: Grid.of(tp=2, offset=-1), "no rank is negative"),
        (lambda: Grid.of(pp=2, dp=2), "found: pp=2"),
        (lambda: Grid.of(tp=2).coordinates(2), "coordinates of rank 2"),
        (lambda: Grid.of(tp=2).rank_at(tp=2), "at {'tp': 2}"),
        (lambda: Grid.of(tp=2).lines("ep"), "along ep"),
    ],
)
def test_what_is_no_grid_is_refused_in_words(make, words):
    with pytest.raises(ShardingError, match=words):
        make()


def test_a_grid_says_its_sizes():
    assert repr(Grid.of(tp=2, dp=4, offset=3)) == "Grid(tp=2 x cp=1 x dp=4 from rank 3)"
    assert (Grid.of(tp=2, dp=4).label, Grid.of().label) == ("tp2 x dp4", "1 rank")
    assert Grid.of(tp=2)["pp"] == 1
