"""A grid against its own enumeration by loops, in every order of the dimensions, and errors for invalid grids."""

import itertools

import pytest

from tests.oracles import bridge as oracle
from workbench.errors import ShardingError
from workbench.sharding.bridge.grid import Grid, GridPair, least_samples


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
def test_an_invalid_grid_is_refused(make, words):
    with pytest.raises(ShardingError, match=words):
        make()


def test_a_grid_has_its_sizes_in_its_label():
    assert repr(Grid.of(tp=2, dp=4, offset=3)) == "Grid(tp=2 x cp=1 x dp=4 from rank 3)"
    assert (Grid.of(tp=2, dp=4).label, Grid.of().label) == ("tp2 x dp4", "1 rank")
    assert Grid.of(tp=2)["pp"] == 1


@pytest.mark.parametrize(
    ("source", "destination", "path", "why"),
    [
        (Grid.of(tp=2, dp=4), Grid.of(tp=2, cp=2, dp=2), "fan-in", ""),
        (Grid.of(tp=4, dp=2), Grid.of(cp=2, dp=4), "fan-out", ""),
        (Grid.of(tp=2, dp=2), Grid.of(cp=2, dp=2), "equal", ""),
        (Grid.of(cp=2, dp=2), Grid.of(tp=2, dp=2), "general", "I3: the source shards its sequence, cp=2"),
        (Grid.of(tp=2, dp=3), Grid.of(tp=3, dp=2), "general", "I4: dp=3 and dp=2 do not divide"),
    ],
)
def test_the_path_is_named(source, destination, path, why):
    pair = GridPair(source, destination)
    assert (pair.path, pair.why_general) == (path, why)
    assert repr(pair) == f"GridPair({source.label} -> {destination.label}: {path})"


def test_gather_lines_are_those_of_the_field():
    """Derived manually from the stated rule for 8 ranks."""
    lines = ((0, 2), (1, 3), (4, 6), (5, 7))
    assert GridPair(Grid.of(tp=2, dp=4), Grid.of(tp=2, cp=2, dp=2)).gather_lines == lines
    assert GridPair(Grid.of(tp=4, dp=2), Grid.of(cp=2, dp=4)).gather_lines == lines
    assert GridPair(Grid.of(tp=2, dp=2), Grid.of(tp=2, dp=2)).gather_lines == ()


def test_every_rank_gathers_exactly_once_and_slots_are_consecutive():
    for ranks in range(1, 17):
        for source, destination in itertools.product(oracle.factors(ranks), repeat=2):
            pair = GridPair(*(Grid.of(tp=tp, cp=cp, dp=dp) for tp, cp, dp in (source, destination)))
            if pair.gather_lines:
                assert sorted(rank for line in pair.gather_lines for rank in line) == list(range(ranks))
                assert {tuple(map(pair.slot, line)) for line in pair.gather_lines} == {tuple(range(pair.ratio))}


def refusal(source, destination):
    try:
        GridPair(source, destination)
    except ShardingError as error:
        return str(error)
    return ""


def test_only_dp_that_is_not_slowest_is_not_nested():
    """Every order of the dimensions of the destination, 2 to 16 ranks: nested iff dp lies above all that is long."""
    refused = set()
    for ranks in (2, 4, 8, 12, 16):
        for (tp, _, dp), (tp_d, cp_d, dp_d) in itertools.product(oracle.factors(ranks), repeat=2):
            if tp * dp != ranks or max(dp, dp_d) % min(dp, dp_d):
                continue
            for names in itertools.permutations(("tp", "cp", "dp")):
                sizes = {"tp": tp_d, "cp": cp_d, "dp": dp_d}
                order = tuple(sizes[name] for name in names)
                if words := refusal(Grid.of(tp=tp, dp=dp), Grid(names, order)):
                    assert "nesting (I5)" in words
                    refused.add(names)
                    assert any(sizes[name] > 1 for name in names[names.index("dp") + 1 :])
    assert refused == {names for names in itertools.permutations(("tp", "cp", "dp")) if names[-1] != "dp"}


def test_an_equal_dp_in_crossed_order_is_refused_too():
    with pytest.raises(ShardingError, match=r"nesting \(I5\)\n  found: rank 1 at dp=0 of .*, at dp=1 of"):
        GridPair(Grid.of(tp=2, dp=2), Grid(("dp", "tp", "cp"), (2, 2, 1)))


@pytest.mark.parametrize("destination", [Grid.of(tp=2, dp=4), Grid.of(tp=2, dp=2, offset=1)])
def test_other_ranks_are_refused(destination):
    with pytest.raises(ShardingError, match=r"same ranks \(I1\)\n  found: ranks 0 to 3 and"):
        GridPair(Grid.of(tp=2, dp=2), destination)


def test_samples_that_both_sides_deal_evenly():
    assert least_samples(GridPair(Grid.of(tp=2, dp=3), Grid.of(tp=3, dp=2))) == 6
