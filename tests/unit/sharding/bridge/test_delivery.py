"""Who holds which tokens before and after, which path that allows, and what contradicts itself."""

import pytest

from tests.helpers.bridges import grid
from workbench.errors import ShardingError
from workbench.sharding.bridge.delivery import Delivery, check_delivery, crossing_of, route_of, sides_of
from workbench.sharding.bridge.pair import GridPair

FAN_IN, FAN_OUT = GridPair(grid((1, 1, 4)), grid((1, 2, 2))), GridPair(grid((2, 1, 2)), grid((1, 1, 4)))


@pytest.mark.parametrize(
    ("pair", "how", "samples", "path", "why"),
    [
        (FAN_IN, Delivery(), [3] * 4, "fan-in", ""),
        (FAN_IN, Delivery(), [3, 3, 2, 3], "general", "I9: samples differ by dp rank, 2 to 3"),
        (FAN_OUT, Delivery(), [4, 4], "fan-out", ""),
        (FAN_OUT, Delivery(), [3, 3], "general", "I8: 3 samples in 2 slots"),
        (FAN_OUT, Delivery("sharded"), [4, 4], "general", "shards are delivered, not whole sequences"),
        (
            GridPair(grid((1, 2, 1)), grid((1, 1, 2))),
            Delivery(),
            [2],
            "general",
            "I3: the source shards its sequence, cp=2",
        ),
    ],
)
def test_the_path_and_the_bound_that_it_passes(pair, how, samples, path, why):
    route = route_of(pair, how, samples)
    assert (route.samples, route.path, route.why) == (tuple(samples), path, why)


@pytest.mark.parametrize("samples", [[1], [1, 1, 1, -1]])
def test_a_number_for_each_dp_rank_is_asked_for(samples):
    with pytest.raises(ShardingError, match="one for each of the 4 dp ranks of the source"):
        route_of(FAN_IN, Delivery(), samples)


def test_who_holds_what():
    """Two samples of eight tokens; cp 2 in zigzag holds 0 1 6 7 and 2 3 4 5 of each, tp a half of that."""
    pair = GridPair(grid((1, 2, 2)), grid((2, 2, 1)))
    before, after = sides_of(pair, Delivery("sharded", "zigzag", True, "contiguous"), [1, 1], 8)
    assert [share.tokens_t.tolist() for share in before.share_of] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert [share.tokens_t.tolist() for share in after.share_of] == [
        [0, 1, 8, 9],
        [6, 7, 14, 15],
        [2, 3, 10, 11],
        [4, 5, 12, 13],
    ]
    _, whole = sides_of(pair, Delivery("whole", "zigzag", source_order="contiguous"), [1, 1], 8)
    assert whole.number_of == (0, 0, 1, 1)
    assert [share.tokens_t.tolist() for share in whole.shares] == [list(range(16))] * 2
    assert whole.shares[1].gradient_rows_t.nonzero().squeeze(1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    _, unknown = sides_of(pair, Delivery("whole", source_order="contiguous"), [1, 1], 8)
    assert all(share.gradient_rows_t.all() for share in unknown.shares)


def test_a_crossing_is_found_again():
    assert crossing_of(FAN_IN, Delivery(), (1,) * 4, 4) is crossing_of(FAN_IN, Delivery(), (1,) * 4, 4)


def test_one_cp_rank_has_every_token_and_needs_no_order():
    one = GridPair(grid((2, 1, 1)), grid((2, 1, 1)))
    for kind in ("whole", "sharded"):
        assert check_delivery(one, Delivery(kind)) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Delivery("both"), "whole or sharded"),
        (lambda: Delivery("whole", "zigzag", True), "sharded by the module that receives it"),
        (lambda: check_delivery(GridPair(grid((1, 2, 1)), grid((2, 1, 1))), Delivery()), "no source_order"),
        (lambda: check_delivery(GridPair(grid((2, 1, 1)), grid((1, 2, 1))), Delivery("sharded")), "no order"),
        (lambda: sides_of(FAN_IN, Delivery("sharded", "zigzag"), [1] * 4, 6), "a positive multiple of 2 . cp = 4"),
        (lambda: sides_of(GridPair(grid((4, 1, 1)), grid((4, 1, 1))), Delivery("sharded", None, True), [1], 6), "I13"),
    ],
)
def test_what_cannot_be_delivered_is_refused_in_words(make, words):
    with pytest.raises(ShardingError, match=words):
        make()
