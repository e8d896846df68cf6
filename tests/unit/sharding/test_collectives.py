"""Each collective forward and backward on two real ranks; the wrong adjoint is off by the axis size."""

import threading

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.stand_in import stand_in
from tests.helpers.threads import Threads, on_threads
from workbench.sharding import collectives, wire
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.simulated import simulate


def derivative_of_a_shared_square(name):
    """d/dx_r of (x_0 + x_1)^2 / 2, where each rank back-propagates its own share of the loss: half of it."""
    mesh = make_mesh(cp=2)
    local = torch.tensor(2.0 + 3.0 * mesh["cp"].rank, requires_grad=True)
    total = getattr(collectives, name)(local, mesh["cp"])
    (total.square() / 4).backward()
    return float(total), float(local.grad)


@pytest.mark.parametrize(("name", "gradient"), [("sum_sum", 7.0), ("sum_identity", 3.5)])
def test_all_reduce_has_two_adjoints(name, gradient, tmp_path):
    # x = (2, 5): the whole loss is 49 / 2 and its derivative 7. Shares need sum_sum; identity gives half.
    assert run_ranks(derivative_of_a_shared_square, 2, tmp_path, name) == [(7.0, gradient)] * 2


def derivative_of_a_replicated_use():
    mesh = make_mesh(tp=2)
    rank = mesh["tp"].rank
    x = torch.tensor(3.0, requires_grad=True)
    (collectives.identity_sum(x, mesh["tp"]) * (rank + 1)).backward()  # different computations of one value
    y = torch.tensor(3.0 + rank, requires_grad=True)
    (collectives.sum_identity(y, mesh["tp"]) * 10).backward()  # the same computation everywhere
    return float(x.grad), float(y.grad)


def test_replicated_values(tmp_path):
    assert run_ranks(derivative_of_a_replicated_use, 2, tmp_path) == [(3.0, 10.0)] * 2


def gathered():
    mesh = make_mesh(cp=2)
    rank = mesh["cp"].rank
    local = torch.tensor([[1.0, 2.0]]) + 10 * rank
    local.requires_grad_()
    whole = collectives.gather_scatter(local, mesh["cp"], dim=1)
    (whole * torch.tensor([[1.0, 2.0, 3.0, 4.0]]) * (rank + 1)).sum().backward()
    uneven = collectives.all_gather(torch.arange(rank + 1), mesh["cp"])
    flags = collectives.all_gather(torch.tensor([rank == 1]), mesh["cp"])
    return whole.tolist(), local.grad.tolist(), [u.tolist() for u in uneven], [f.item() for f in flags], flags[0].dtype


def test_gather_sums_the_gradients_of_all_users(tmp_path):
    first, second = run_ranks(gathered, 2, tmp_path)
    assert first[0] == second[0] == [[1.0, 2.0, 11.0, 12.0]]
    assert first[1] == [[3.0, 6.0]]  # 1 * (1 + 2), 2 * (1 + 2)
    assert second[1] == [[9.0, 12.0]]
    assert first[2] == second[2] == [[0], [0, 1]]
    assert first[3] == [False, True]
    assert first[4] == torch.bool


def scattered():
    mesh = make_mesh(tp=2)
    rank = mesh["tp"].rank
    partial = torch.tensor([[1.0, 2.0, 3.0, 4.0]]) * (rank + 1)
    partial.requires_grad_()
    own = collectives.scatter_gather(partial, mesh["tp"], dim=1)
    (own * torch.tensor([[10.0, 20.0]]) * (rank + 1)).sum().backward()
    local = torch.tensor([[1.0, 2.0]]) + 10 * rank
    local.requires_grad_()
    whole = collectives.gather_slice(local, mesh["tp"], dim=1)
    (whole * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()  # the same computation everywhere
    same = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    piece = collectives.slice_gather(same, mesh["tp"], dim=1)
    (piece * (rank + 5)).sum().backward()
    return own.tolist(), partial.grad.tolist(), whole.tolist(), local.grad.tolist(), piece.tolist(), same.grad.tolist()


def test_a_sum_in_pieces_and_a_gather_for_one_computation(tmp_path):
    first, second = run_ranks(scattered, 2, tmp_path)
    assert (first[0], second[0]) == ([[3.0, 6.0]], [[9.0, 12.0]])
    assert first[1] == second[1] == [[10.0, 20.0, 20.0, 40.0]]  # each part of the sum went into both pieces
    assert first[2] == second[2] == [[1.0, 2.0, 11.0, 12.0]]
    assert (first[4], second[4]) == ([[1.0, 2.0]], [[3.0, 4.0]])
    assert first[5] == second[5] == [[5.0, 5.0, 6.0, 6.0]]  # the gradient of each rank for its piece, on every rank
    assert (first[3], second[3]) == ([[1.0, 2.0]], [[3.0, 4.0]])  # own piece of a gradient that is whole already


@pytest.mark.parametrize("name", ["sum_identity", "sum_sum", "identity_sum"])
def test_axis_of_one_rank_is_the_identity(name):
    x = torch.randn(3)
    assert getattr(collectives, name)(x, Axis("tp")) is x


@pytest.mark.parametrize("name", ["gather_scatter", "scatter_gather", "gather_slice", "slice_gather"])
def test_axis_of_one_rank_is_one_piece(name):
    x = torch.randn(3)
    assert getattr(collectives, name)(x, Axis("tp"), dim=0) is x


def summed_together(rank, group, bucket_bytes):
    axis = Axis("dp_cp", 2, rank, group, range(2))
    tensors = [
        torch.tensor([1.0, 2.0]),
        torch.arange(6.0).view(2, 3).T,
        torch.empty(0),
        torch.tensor(3.0),
        torch.tensor([4.0], dtype=torch.float64),
        torch.arange(5.0),
        torch.tensor([[7.0, 8.0]]).T,
    ]
    local = [tensor.mul_(1 + 10 * rank) for tensor in tensors]
    collectives.all_sum_(tensors, axis, bucket_bytes=bucket_bytes)
    assert all(tensor is one for tensor, one in zip(tensors, local, strict=True))
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize(
    ("bucket_bytes", "sizes"), [(2**20, [9, 1, 7]), (35, [8, 1, 1, 7]), (1, [2, 6, 0, 1, 1, 5, 2])]
)
def test_many_tensors_are_summed_in_place_in_few_collectives(bucket_bytes, sizes, monkeypatch):
    slots, barrier, reduced = [None] * 2, threading.Barrier(2), []
    all_reduce = wire.all_reduce
    monkeypatch.setattr(
        wire,
        "all_reduce",
        lambda tensor, group: (reduced.append((group.rank, tensor.numel())), all_reduce(tensor, group)),
    )
    answers = on_threads(lambda rank: summed_together(rank, Threads(rank, slots, barrier), bucket_bytes), 2)
    assert (
        answers[0]
        == answers[1]
        == [[12, 24], [[0, 36], [12, 48], [24, 60]], [], 36, [48], [0, 12, 24, 36, 48], [[84], [96]]]
    )
    assert [numel for rank, numel in reduced if rank == 1] == sizes


def outside_autograd(axis):
    pieces_R = torch.arange(6.0).view(3, 2) + 100 * axis.rank
    arrive = collectives.start_rotation(pieces_R[0], axis)
    return (
        collectives.gather_equal(pieces_R[0], axis),
        collectives.scatter_sum(pieces_R.clone(), axis),
        collectives.exchange(pieces_R, axis),
        arrive(),
        collectives.exchange_rows(pieces_R[:1], torch.eye(3, dtype=torch.int64).roll(1, 1), axis),
    )


def test_moves_of_shards_outside_autograd():
    slots, barrier = [None] * 3, threading.Barrier(3)
    answers = on_threads(lambda rank: outside_autograd(Axis("cp", 3, rank, Threads(rank, slots, barrier))), 3)
    for rank, (whole, own, exchanged, before, rows) in enumerate(answers):
        assert whole.tolist() == [[0, 1], [100, 101], [200, 201]]
        assert own.tolist() == [300 + 6 * rank, 303 + 6 * rank]
        assert exchanged.tolist() == [[100 * other + 2 * rank, 100 * other + 2 * rank + 1] for other in range(3)]
        assert before.tolist() == whole[(rank - 1) % 3].tolist()
        assert rows.tolist() == [before.tolist()], "the one row of the rank before"


def extremes():
    mesh = make_mesh(dp=2)
    value = torch.tensor([float(mesh["dp"].rank), -torch.inf])
    return collectives.all_max(value, mesh["dp"]).tolist(), value.tolist()


def test_max_has_minus_infinity_as_identity(tmp_path):
    assert run_ranks(extremes, 2, tmp_path)[0] == ([1.0, -torch.inf], [0.0, -torch.inf])


def of_rank(rank):
    """Tensors of three shapes and dtypes whose first dimensions differ by rank, one of them empty on rank 0."""
    return [
        torch.arange(6.0 + 3 * rank).view(-1, 3),
        torch.arange(rank, dtype=torch.float32) + 10,
        torch.tensor([rank == 1, True]),
        torch.arange(8, dtype=torch.float64).view(2, 2, 2) * (rank + 1),
        torch.zeros(3, 0),
    ]


@pytest.mark.parametrize(("bucket_bytes", "collectives_of_data"), [(2**20, 4), (48, 5), (1, 5)])
def test_many_are_gathered_as_each_would_be_alone_in_few_collectives(bucket_bytes, collectives_of_data, monkeypatch):
    sent = []

    def counted(tensor, *group):
        sent.append(tensor)
        return wire.all_gather(tensor, *group)

    monkeypatch.setattr(collectives, "wire", stand_in(wire, all_gather=counted))

    def gather(mesh):
        own, axis = of_rank(mesh["cp"].rank), mesh["cp"]
        alone = [collectives.all_gather(tensor, axis) for tensor in own]
        return alone, list(collectives.gather_many(own, axis, bucket_bytes=bucket_bytes))

    gathered = simulate(gather, cp=3)
    assert len(sent) == 3 * (2 * 5 + 1 + collectives_of_data)
    for alone, many in gathered:
        for of_alone, of_many, *expected in zip(alone, many, *map(of_rank, range(3)), strict=True):
            for one, other, right in zip(of_alone, of_many, expected, strict=True):
                assert one.dtype == other.dtype == right.dtype
                assert torch.equal(one, right)
                assert torch.equal(other, right)


def test_on_an_axis_of_one_many_are_themselves():
    [[one], [two]] = collectives.gather_many([torch.arange(3), torch.ones(2)], Axis("cp"))
    assert (one.tolist(), two.tolist()) == ([0, 1, 2], [1.0, 1.0])
    assert list(collectives.gather_many([], Axis("cp"))) == []
