"""Transferred rows, counted manually for small grids, and the drawing."""

import pytest
import torch

from tests.helpers.bridges import grid
from workbench.errors import ShardingError
from workbench.sharding.bridge.delivery import Delivery
from workbench.sharding.bridge.grid import GridPair
from workbench.sharding.bridge.traffic import Traffic

FAN_IN, FAN_OUT = GridPair(grid((2, 1, 4)), grid((2, 2, 2))), GridPair(grid((4, 1, 2)), grid((1, 2, 4)))


@pytest.mark.parametrize(
    ("pair", "how", "forward", "backward"),
    [
        # one sample of 8 tokens a source rank; of 2 samples at the destination, each cp rank has gradients for 4 tokens
        (FAN_IN, Delivery(order="zigzag"), 8, 2 * 4),
        (FAN_IN, Delivery(), 8, 2 * 8),
        # in a fan-out the source has 2 samples, the destination 1: half of it over cp, then a whole one of a sibling
        (FAN_OUT, Delivery(order="zigzag"), 0, 4 + 8),
        (FAN_OUT, Delivery(), 0, 8 + 8),
    ],
)
def test_bytes_of_the_fast_path(pair, how, forward, backward):
    traffic = Traffic.of(pair, how, tokens=8)
    assert [traffic.received_bytes(way, 10) for way in ("forward", "backward")] == [10 * forward, 10 * backward]


def test_shards_cost_less_than_whole_sequences():
    shards = Traffic.of(FAN_IN, Delivery("sharded", "zigzag"), tokens=8)
    assert shards.route.path == "general"
    assert shards.received_bytes("forward", 1) == 4, "half of the sample of the other slot"
    assert shards.received_bytes("backward", 1) == 4, "half of the own sample"


def test_the_general_path_brings_a_fan_in_its_own_slot_only():
    """Whole sequences either way; backward half of the own sample, where the fast path gathers half of both."""
    traffic = Traffic.of(FAN_IN, Delivery(order="zigzag"), tokens=8, general=True)
    assert repr(traffic) == "Traffic(tp2 x dp4 -> tp2 x cp2 x dp2: general (as requested); 4 samples of 8 tokens)"
    assert [traffic.received_bytes(way, 1) for way in ("forward", "backward")] == [8, 4]


def test_every_row_that_a_rank_lacks_comes_from_one_that_has_it():
    traffic = Traffic.of(GridPair(grid((2, 1, 3)), grid((1, 3, 2))), Delivery("sharded", "zigzag"))
    [forward, backward] = traffic.steps
    assert forward.rows_RR.sum(0).tolist() == [len(share.tokens_t) for share in traffic.sides[1].share_of]
    assert backward.rows_RR.sum(0).tolist() == [len(share.tokens_t) for share in traffic.sides[0].share_of]
    assert torch.equal(forward.between, forward.rows_RR - torch.diag(forward.rows_RR.diagonal()))


def test_the_drawing_shows_owners_and_senders():
    traffic = Traffic.of(GridPair(grid((1, 1, 2)), grid((1, 2, 1))), Delivery("sharded", "zigzag"), samples=[1, 0])
    assert traffic.drawing().splitlines() == [
        "rank  source           holds         destination      gets",
        "   0  dp0 cp0 tp0      0             dp0 cp0 tp0      0: 0, 3",
        "   1  dp1 cp0 tp0      -             dp0 cp1 tp0      0: 1, 2",
        "forward, exchange of rows: rows from (line) to (column)",
        "       0   1",
        "   0       2",
        "   1",
        "backward, exchange of gradients of distinct consumers: rows from (line) to (column)",
        "       0   1",
        "   0",
        "   1   2",
    ]
    wide = Traffic.of(GridPair(grid((1, 1, 2)), grid((1, 2, 1))), Delivery("sharded", "zigzag"), tokens=40000)
    assert "   0         20000" in wide.drawing()
    assert repr(traffic) == (
        "Traffic(dp2 -> cp2: general (shards are delivered, not whole sequences); 1 samples of 4 tokens)"
    )


def test_long_shares_are_cut_short():
    traffic = Traffic.of(GridPair(grid((1, 1, 1)), grid((1, 1, 1))), samples=[9], tokens=2)
    assert "0, 1, 2, 3 ..." in traffic.drawing()
    shards = Traffic.of(GridPair(grid((1, 1, 2)), grid((1, 2, 1))), Delivery("sharded", "zigzag"), tokens=40)
    assert "0, 1: 0, 1, 2, 3, 4, 5, 6, 7 ..." in shards.drawing()


def test_an_invalid_pair_has_no_traffic():
    with pytest.raises(ShardingError, match="no order"):
        Traffic.of(FAN_IN, Delivery("sharded"))
