"""Which path leads between two grids, and which grids nothing leads between."""

import itertools

import pytest

from tests.oracles import bridge as oracle
from workbench.errors import ShardingError
from workbench.sharding.bridge.grid import Grid
from workbench.sharding.bridge.pair import GridPair, least_samples


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
    """Worked out by hand from the stated rule for 8 ranks."""
    lines = ((0, 2), (1, 3), (4, 6), (5, 7))
    assert GridPair(Grid.of(tp=2, dp=4), Grid.of(tp=2, cp=2, dp=2)).gather_lines == lines
    assert GridPair(Grid.of(tp=4, dp=2), Grid.of(cp=2, dp=4)).gather_lines == lines
    assert GridPair(Grid.of(tp=2, dp=2), Grid.of(tp=2, dp=2)).gather_lines == ()


def test_every_rank_gathers_once_and_slots_count_up():
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


def test_an_equal_dp_that_is_laid_crosswise_is_refused_too():
    with pytest.raises(ShardingError, match=r"nesting \(I5\)\n  found: rank 1 at dp=0 of .*, at dp=1 of"):
        GridPair(Grid.of(tp=2, dp=2), Grid(("dp", "tp", "cp"), (2, 2, 1)))


@pytest.mark.parametrize("destination", [Grid.of(tp=2, dp=4), Grid.of(tp=2, dp=2, offset=1)])
def test_other_ranks_are_refused(destination):
    with pytest.raises(ShardingError, match=r"same ranks \(I1\)\n  found: ranks 0 to 3 and"):
        GridPair(Grid.of(tp=2, dp=2), destination)


def test_samples_that_both_sides_deal_evenly():
    assert least_samples(GridPair(Grid.of(tp=2, dp=3), Grid.of(tp=3, dp=2))) == 6
