"""The tokens of each rank before and after, the path that this allows, and contradictions."""

import pytest
import torch

from tests.helpers.bridges import grid
from tests.oracles import bridge as oracle
from workbench.errors import ShardingError
from workbench.sharding.bridge.delivery import (
    Delivery,
    SequencePartition,
    check_delivery,
    crossing_of,
    owned_positions,
    route_of,
    sides_of,
)
from workbench.sharding.bridge.grid import GridPair
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

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
def test_one_number_per_dp_rank_is_required(samples):
    with pytest.raises(ShardingError, match="one for each of the 4 dp ranks of the source"):
        route_of(FAN_IN, Delivery(), samples)


def test_tokens_of_each_rank():
    """Two samples of eight tokens; cp 2 in zigzag has 0 1 6 7 and 2 3 4 5 of each, tp a half of that."""
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


def test_a_crossing_is_reused():
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
def test_invalid_deliveries_are_refused(make, words):
    with pytest.raises(ShardingError, match=words):
        make()


WHOLE = torch.arange(2 * 24.0).view(2, 24, 1)


def split(mesh, *, sequence_parallel, dim=1):
    """On a rank: its tokens, and the gradient of the whole if it brings 1 + its rank for each of its tokens."""
    whole = WHOLE.movedim(1, dim).clone().requires_grad_()
    partition = SequencePartition(mesh["cp"], "zigzag", *([mesh["tp"]] if sequence_parallel else []))
    local = partition.split(whole, dim=dim)
    local.backward(torch.full_like(local, 1.0 + mesh["tp"].rank if sequence_parallel else 1.0))
    return local.detach().movedim(dim, 1), whole.grad.movedim(dim, 1)


@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_cp_ranks_get_their_zigzag_and_bring_zero_elsewhere(cp, dim):
    by_rank = simulate(lambda mesh: split(mesh, sequence_parallel=False, dim=dim), cp=cp, tp=2)
    for rank, (local, gradient) in enumerate(by_rank):
        places = oracle.zigzag(24, cp, rank // 2)
        assert torch.equal(local, WHOLE[:, places])
        assert gradient[0, :, 0].nonzero().squeeze(1).tolist() == places
    assert torch.equal(sum(gradient for _, gradient in by_rank[::2]), torch.ones_like(WHOLE))


def test_tp_ranks_get_stretches_and_the_gradient_of_all_of_them():
    """2 cp x 3 tp: a stretch of 4 tokens; what comes back is 1, 2, 3 at the stretches of tp 0, 1, 2 on each of them."""
    for rank, (local, gradient) in enumerate(simulate(lambda mesh: split(mesh, sequence_parallel=True), cp=2, tp=3)):
        places = oracle.zigzag(24, 2, rank // 3)
        assert torch.equal(local, WHOLE[:, oracle.stretch(places, 3, rank % 3)])
        wanted = torch.zeros(24)
        for tp in range(3):
            wanted[oracle.stretch(places, 3, tp)] = 1.0 + tp
        assert torch.equal(gradient[0, :, 0], wanted)


@pytest.mark.parametrize(
    ("tokens", "sizes", "words"),
    [
        (6, {"cp": 2}, "6 tokens over cp=2"),
        (12, {"cp": 2, "tp": 4}, r"12 tokens over cp=2 and tp=4 \(I13\)\n  found: 6 tokens on a cp rank"),
    ],
)
def test_lengths_that_do_not_divide_are_refused(tokens, sizes, words):
    with pytest.raises(ShardingError, match=words):
        simulate(
            lambda mesh: SequencePartition(mesh["cp"], "zigzag", mesh["tp"]).split(torch.zeros(1, tokens), dim=1),
            **sizes,
        )


def test_a_sequence_of_one_rank_is_as_it_was():
    assert torch.equal(SequencePartition(Axis("cp")).split(WHOLE, dim=1), WHOLE)
    assert owned_positions("zigzag", 3, 1).tolist() == [[0, 1, 2]], "any length, where nothing is cut"
    assert owned_positions("document_zigzag", 8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
