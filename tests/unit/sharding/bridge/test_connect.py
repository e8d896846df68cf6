"""A bridge: the groups that it creates and reuses, refusals by name, and several bridges into one model."""

import pytest
import torch

from tests.helpers.bridges import cross, grid, truth
from workbench.errors import LaunchError, ShapeError, ShardingError
from workbench.records.watching import watch_losses
from workbench.sharding import flight
from workbench.sharding.bridge import Grid, GridGroups, SequencePartition, connect
from workbench.sharding.mesh import Axis
from workbench.sharding.simulated import simulate

SOURCE, DESTINATION = grid((2, 1, 2)), grid((1, 2, 2))


def on_ranks(function, ranks=4):
    return simulate(lambda mesh: function(GridGroups(mesh["dp"])), dp=ranks)


def test_the_trainers_cp_group_is_used_and_none_is_made():
    def groups_of(groups):
        mesh = groups.mesh(DESTINATION)
        before = repr(groups)
        given = connect(SOURCE, DESTINATION, groups, cp=mesh["cp"])
        result = connect(SOURCE, DESTINATION, groups)
        return given.cp.group is mesh["cp"].group, result.cp.group is mesh["cp"].group, repr(groups) == before

    assert set(on_ranks(groups_of)) == {(True, True, True)}


def test_two_encoders_bring_their_gradients_home_through_one_model():
    """Vision tp2 x dp2 and audio dp4 into cp2 x dp2: each loss term weighs one of them, and each gets its own back."""

    def of_rank(groups):
        bridges = [connect(encoder, DESTINATION, groups, order="zigzag") for encoder in (SOURCE, grid((1, 1, 4)))]
        partition = SequencePartition(groups.get(DESTINATION, "cp"))
        held = [torch.ones(4 // bridge.pair.source["dp"], 8, 1, requires_grad=True) for bridge in bridges]
        local = [partition.split(bridge.cross(one), dim=1) for bridge, one in zip(bridges, held, strict=True)]
        (2 * local[0] + 3 * local[1]).sum().backward()
        return [one.grad.unique().tolist() for one in held], [bridge.pair.path for bridge in bridges]

    assert on_ranks(of_rank) == [([[2.0], [3.0]], ["equal", "fan-in"])] * 4


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ((SOURCE, DESTINATION, {}), "Bridge(tp2 x dp2 -> cp2 x dp2: equal, whole sequences)"),
        (
            (SOURCE, DESTINATION, {"delivery": "sharded", "order": "zigzag"}),
            "Bridge(tp2 x dp2 -> cp2 x dp2: general (shards are delivered, not whole sequences), sharded sequences)",
        ),
        (
            (DESTINATION, SOURCE, {"source_order": "zigzag"}),
            "Bridge(cp2 x dp2 -> tp2 x dp2: general (I3: the source shards its sequence, cp=2), whole sequences)",
        ),
    ],
)
def test_the_general_path_states_its_reason(way, said):
    source, destination, more = way
    assert set(on_ranks(lambda groups: repr(connect(source, destination, groups, **more)))) == {said}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda groups: {"layout": "hsb"}, r"layout 'hsb' \(I10\)\n  do|layout 'hsb' \(I10\)"),
        (lambda groups: {"delivery": "sharded"}, "no order"),
        (lambda groups: {"cp": groups.make(DESTINATION, "dp")}, r"cp group \(I6\)\n  found: ranks .*0, 2"),
        (lambda groups: {"cp": Axis("cp")}, r"cp group \(I6\)\n  found: ranks .0,. on rank 0"),
    ],
)
def test_invalid_connections_are_refused_by_name(given, words):
    with pytest.raises(ShardingError, match=words):
        on_ranks(lambda groups: connect(SOURCE, DESTINATION, groups, **given(groups)))


def test_grids_larger_than_the_job_are_refused():
    with pytest.raises(ShardingError, match=r"a job of 4 rank\(s\)"):
        on_ranks(lambda groups: connect(grid((2, 1, 4)), grid((2, 1, 4)), groups))


@pytest.mark.parametrize(
    ("bring", "kind", "words"),
    [
        (lambda rank: (torch.zeros(2, 4), [2, 2]), ShapeError, r"\[b, s, h\] of floating point"),
        (lambda rank: (torch.zeros(2, 4, 1).long(), [2, 2]), ShapeError, "int64"),
        (
            lambda rank: (torch.zeros(2, 4, 1), [2, 3]),
            ShapeError,
            "2 samples on dp rank 1\n  rule: 3, as declared in samples",
        ),
        (lambda rank: (torch.zeros(2, 4, 1), [2]), ShardingError, "one for each of the 2 dp ranks"),
        (lambda rank: (torch.zeros(2, 5, 1), [2, 2]), ShardingError, "zigzag order of 5 tokens over cp=2"),
        (lambda rank: (torch.zeros(1 + rank, 4, 1), None), ShardingError, "rank 1 has 2 samples of 4 tokens"),
        (lambda rank: (torch.zeros(2, 4 + rank // 2, 1), None), ShardingError, r"all sequences have one length \(I9\)"),
    ],
)
def test_invalid_tensors_are_refused_in_cross(bring, kind, words):
    def of_rank(groups):
        values, samples = bring(groups.rank)
        return connect(SOURCE, DESTINATION, groups, order="zigzag").cross(values, samples)

    with pytest.raises(kind, match=words):
        on_ranks(of_rank)


def test_a_rank_outside_of_the_grids_has_nothing_to_cross():
    with pytest.raises(ShardingError, match="coordinates of rank 4"):
        on_ranks(lambda groups: connect(SOURCE, DESTINATION, groups).cross(torch.zeros(2, 4, 1), [2, 2]), 5)


def halved_on_one_tp_rank(groups, order="zigzag", scale=lambda rank: 1.0, grow=lambda rank: 1.0):
    """On a rank: cross with values and gradients that are wrong on some ranks, and checked."""
    bridge = connect(SOURCE, grid((2, 1, 2)), groups, order=order)
    values = torch.ones(2, 4, 1, requires_grad=True)
    out = bridge.cross(scale(groups.rank) * values, [2, 2], checked=True)
    (grow(groups.rank) * out).sum().backward()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"scale": lambda rank: 1.0 + (rank == 1)},
            r"values at the source\n  found: rank\(s\) \[1\] differ from rank 0",
        ),
        (
            {"grow": lambda rank: 1.0 - 0.5 * (rank == 3)},
            r"gradients at the destination\n  found: rank\(s\) \[3\] differ",
        ),
    ],
)
def test_differing_replicas_are_named_if_checked(wrong, words):
    with pytest.raises(ShardingError, match=words):
        on_ranks(lambda groups: halved_on_one_tp_rank(groups, **wrong))
    on_ranks(halved_on_one_tp_rank)


def test_a_gradient_on_another_ranks_token_is_named_if_checked():
    def of_rank(groups):
        bridge = connect(SOURCE, DESTINATION, groups, order="zigzag")
        bridge.cross(torch.ones(2, 4, 1, requires_grad=True), [2, 2], checked=True).sum().backward()

    with pytest.raises(ShardingError, match="another cp rank's"):
        on_ranks(of_rank)


def test_a_rank_that_uses_nothing_keeps_the_others_waiting():
    def of_rank(groups):
        out = connect(SOURCE, DESTINATION, groups, order="zigzag").cross(torch.ones(2, 4, 1), [2, 2])
        if groups.rank:
            out.sum().backward()

    with pytest.raises(LaunchError, match=r"rank 1 .* waits in gather_equal over cp"):
        on_ranks(of_rank)


def test_micro_batches_add_up():
    """Twice the same micro-batch gives twice the gradient."""
    problem = ((2, 1, 2), (1, 2, 2), 4, "whole")
    rows = truth(*problem)

    def of_rank(groups):
        bridge = connect(SOURCE, DESTINATION, groups, order="zigzag")
        held, _, brought, wanted = rows[groups.rank]
        values = held.clone().requires_grad_()
        for _ in range(2):
            bridge.cross(values, [2, 2]).backward(brought)
        return torch.equal(values.grad, 2 * wanted), cross(groups, *problem, "zigzag", rows)

    assert on_ranks(of_rank) == [(True, (True, "equal"))] * 4


@pytest.mark.parametrize(
    ("order", "delivery", "names"),
    [("zigzag", "whole", {"gather_equal"}), (None, "whole", {"all_sum"}), ("zigzag", "sharded", {"exchange_rows"})],
)
def test_a_record_of_collectives_names_the_line_that_crosses(order, delivery, names, tmp_path):
    def of_rank(groups):
        bridge = connect(SOURCE, DESTINATION, groups, order=order, delivery=delivery)
        bridge.cross(torch.ones(2, 4, 1), [2, 2]).sum().backward()

    stop_watching = watch_losses(lambda loss: None)  # as a recorder does: its lines are not the caller's
    flight.start(tmp_path / "rank0.flight", 0)
    try:
        on_ranks(of_rank)
    finally:
        flight.stop()
        stop_watching()
    entries = [entry for entry in flight.read(tmp_path / "rank0.flight").entries if entry.name != "make_groups"]
    assert {entry.name for entry in entries} == names
    assert {entry.caller.partition(":")[0] for entry in entries} == {"bridge/test_connect.py"}


def test_pipelines_are_refused():
    with pytest.raises(ShardingError, match="found: pp=2"):
        Grid.of(pp=2, dp=2)
