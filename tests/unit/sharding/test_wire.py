"""Each transfer, over gloo and among simulated ranks, against its definition."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.threads import Threads, on_threads
from workbench.sharding import wire
from workbench.sharding.simulated import simulate


def moves(rank, group, size):
    local = torch.arange(2.0) + 10 * rank
    pieces_R = torch.stack([local + 100 * other for other in range(size)])
    total, most = local.clone(), local.clone()
    wire.all_reduce(total, group)
    wire.all_reduce(most, group, largest=True)
    counts_RR = torch.tensor([[0, 1, 2], [0, 0, 0], [1, 0, 3]])  # rows from rank to rank
    rows = torch.arange(float(counts_RR[rank].sum()))[:, None] + 10 * rank
    wait = wire.start_rotation(local, group, rank, size)
    return {
        "mine": local,
        "total": total,
        "most": most,
        "all": wire.all_gather(local, group, size),
        "swapped": wire.all_to_all(pieces_R, group, rank),
        "rotated": wait(),
        "rotated back": wire.start_rotation(local, group, rank, size, size - 1)(),
        "rows": wire.exchange_rows(rows, counts_RR, group, rank),
    }


def over_gloo():
    import torch.distributed as dist

    return moves(dist.get_rank(), dist.group.WORLD, dist.get_world_size())


def flat_moves():
    import torch.distributed as dist

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole, own = torch.empty(2 * size), torch.empty(2, 1)
    wire.all_gather_into(whole, torch.arange(2.0) + 10 * rank, group)
    wire.reduce_scatter_into(own, torch.arange(2.0 * size) + rank, group)
    return whole, own


def test_flat_moves_write_into_the_given_buffer(tmp_path):
    for rank, (whole, own) in enumerate(run_ranks(flat_moves, 3, tmp_path)):
        assert whole.tolist() == [0, 1, 10, 11, 20, 21]
        assert own.tolist() == [[6.0 * rank + 3], [6.0 * rank + 6]]


def in_threads(size):
    slots, barrier = [None] * size, threading.Barrier(size)
    return on_threads(lambda rank: moves(rank, Threads(rank, slots, barrier), size), size)


@pytest.mark.parametrize("where", ["gloo", "threads"])
def test_every_move_matches_its_definition(where, tmp_path):
    size = 3
    for rank, result in enumerate(run_ranks(over_gloo, size, tmp_path) if where == "gloo" else in_threads(size)):
        base = torch.arange(2.0)
        assert torch.equal(result["mine"], base + 10 * rank), "what was sent is as it was"
        assert torch.equal(result["total"], 3 * base + 30)
        assert torch.equal(result["most"], base + 20)
        assert torch.equal(torch.stack(result["all"]), torch.stack([base + 10 * r for r in range(size)]))
        assert torch.equal(result["swapped"], torch.stack([base + 10 * r + 100 * rank for r in range(size)]))
        assert result["rows"].flatten().tolist() == [[20], [0], [1, 2, 21, 22, 23]][rank]
        assert torch.equal(result["rotated"], base + 10 * ((rank - 1) % size))
        assert torch.equal(result["rotated back"], base + 10 * ((rank + 1) % size))


def some_of_gloo():
    import torch.distributed as dist

    groups = [wire.subgroup(dist.group.WORLD, "odd", ranks) for ranks in ((0, 2), (1,))]
    total = torch.tensor(float(10 ** dist.get_rank()))
    if groups[0] is not None:
        wire.all_reduce(total, groups[0])
        wire.release(groups[0])
    return [group is None for group in groups], float(total)


def some_of_simulated(mesh):
    world = mesh["dp"].group
    groups = [wire.subgroup(world, "odd", ranks) for ranks in ((0, 2), (1,))]
    total = torch.tensor(float(10 ** mesh["dp"].rank))
    if groups[0] is not None:
        wire.all_reduce(total, groups[0])
        wire.release(groups[0])
    return [group is None for group in groups], float(total)


@pytest.mark.parametrize("where", ["gloo", "simulated"])
def test_a_group_of_some_ranks(where, tmp_path):
    result = run_ranks(some_of_gloo, 3, tmp_path) if where == "gloo" else simulate(some_of_simulated, dp=3)
    assert result == [([False, True], 101.0), ([True, False], 10.0), ([False, True], 101.0)]


def test_only_a_process_group_has_a_name():
    assert wire.group_name(None) == wire.group_name(Threads(0, [], None)) == ""


def test_a_reduction_of_simulated_ranks_is_computed_once_and_in_their_order():
    """1e16 + 1 - 1e16 is 0 in this order and 1 in another."""
    gathered = wire.Gathered(torch.tensor([value], dtype=torch.float64) for value in (1e16, 1.0, -1e16))
    assert gathered.reduced(largest=False).tolist() == [0.0]
    assert gathered.reduced(largest=True).tolist() == [1e16]
    assert gathered.reduced(largest=False) is gathered.reduced(largest=False)
    assert [tensor.item() for tensor in gathered] == [1e16, 1.0, -1e16]
