"""Ranks of cp keep parts of the integers of weights: the same sums, in a part of the memory."""

from __future__ import annotations

import contextlib
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.exact_step import BLOCK, DOCUMENTS, at_random, in_order, own_step
from tests.helpers.same_bits import same_bits
from workbench.policy.model import load_policy
from workbench.reproducible import Resolution, parts
from workbench.reproducible.exact_sums import Accumulator, Leaves
from workbench.reproducible.kernels import plain
from workbench.reproducible.parts import share_integers
from workbench.sharding import flight
from workbench.sharding.mesh import make_mesh, single_process_mesh
from workbench.sharding.simulated import simulate

SIZES = {"a": (3, 2), "b": (5,), "c": (7, 3)}


def accumulators():
    return {name: Accumulator(torch.Size(shape), torch.device("cpu"), Leaves()) for name, shape in SIZES.items()}


def in_buckets(mesh, limit, monkeypatch):
    monkeypatch.setattr(parts, "BUCKET", limit)
    sums = accumulators()
    share_integers(sums, dict.fromkeys(sums, torch.float32), mesh)
    for one in sums.values():
        one.start(32)
    return sums


def whole(sums):
    found = {}
    for bucket in dict.fromkeys(one.bucket for one in sums.values()):
        found |= dict(bucket.gradients(lambda total, dtype: plain.to_gradient(total, 1.0, dtype), torch.float32))
    return found


def partial(name, number):
    return torch.randint(100, SIZES[name], generator=torch.Generator().manual_seed(number + 10 * len(name)))


@pytest.mark.parametrize("limit", [1, 11, 100])
@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2}, {"cp": 3}, {"dp": 4}, {}])
def test_every_rank_has_the_sum_over_all_and_over_all_backward_passes(sizes, limit, monkeypatch):
    """The last backward leaves a weight out; one rank of dp has no row at all."""
    ranks = math.prod(sizes.values())

    def summed(mesh):
        sums = in_buckets(mesh, limit, monkeypatch)
        for turn in range(0 if mesh["dp"].rank == 1 else 3):
            for name, one in reversed(sums.items()):
                if (turn, name) != (2, "b"):
                    one.total.add_(partial(name, ranks * turn + mesh["dp_cp"].rank))
                    one.added()
        return whole(sums)

    cp = sizes.get("cp", 1)
    with_rows = [rank for rank in range(ranks) if rank // cp != 1]
    for found in simulate(summed, **sizes):
        for name in SIZES:
            turns = range(2 if name == "b" else 3)
            expected = sum(partial(name, ranks * turn + rank) for turn in turns for rank in with_rows)
            assert torch.equal(found[name], expected.float()), name


def test_a_rank_keeps_a_part_and_nothing_of_a_step_that_was_not_finished(monkeypatch):
    def kept(mesh):
        sums = in_buckets(mesh, 100, monkeypatch)
        (bucket,) = {one.bucket for one in sums.values()}
        seen = []
        for _ in range(2):
            for one in sums.values():
                one.start(32)
            seen.append(bucket.live_bytes)
            for one in sums.values():
                one.total.add_(1)
                one.added()
            bucket._transfer.end()
            seen.append(bucket.live_bytes)
        return seen, {name: value.unique().tolist() for name, value in whole(sums).items()}

    for seen, values in simulate(kept, cp=4):
        assert seen == [0, 64, 0, 64]  # 32 of 8 bytes, of which a rank has a quarter
        assert values == {name: [4.0] for name in SIZES}


@pytest.mark.parametrize(("shares", "sizes"), [((3, 1), {"dp": 2, "cp": 2}), ((0, 4), {"dp": 2})])
def test_ranks_of_dp_may_have_different_numbers_of_rows(shares, sizes, monkeypatch):
    """Only ranks that share a row meet in its backward."""
    monkeypatch.setattr(parts, "BUCKET", 5000)
    expected = own_step(single_process_mesh(), in_order("contiguous"), Resolution(BLOCK, 2))
    by_rank = simulate(lambda mesh: own_step(mesh, at_random(2), Resolution(BLOCK, 2), shares=shares), **sizes)
    for of_rank in by_rank:
        assert [name for name, value in of_rank.items() if not same_bits(value, expected[name])] == []
    assert set().union(*by_rank) == set(expected)


@pytest.mark.parametrize(("limit", "buckets"), [(1, 3 * 7), (2**23, 1)])
def test_sums_start_in_backward_and_one_at_a_time(limit, buckets, monkeypatch):
    """A bucket is summed once a backward; its sum ends before the next begins, the first one's before the last row."""
    monkeypatch.setattr(parts, "BUCKET", limit)
    entered = []
    inside = flight.entering

    @contextlib.contextmanager
    def noted(name, *more, **further):
        entered.append(name)
        with inside(name, *more, **further):
            yield

    monkeypatch.setattr(flight, "entering", noted)
    with one_of_four() as mesh:
        own_step(mesh, in_order("zigzag"), Resolution(BLOCK))
    sums = [name for name in entered if name in ("start_scatter_sum", "end of scatter_sum")]
    assert sums == ["start_scatter_sum", "end of scatter_sum"] * (len(DOCUMENTS) * buckets)
    assert "scatter_sum" in entered[entered.index("end of scatter_sum") :]  # of attention


class LiveIntegers(TorchDispatchMode):
    """Bytes of the storages of 64-bit integers: now, and the most so far."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for one in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(one, torch.Tensor) and one.dtype == torch.int64:
                self._count(one.untyped_storage())
        return out

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self._known.discard(key)
        self.now -= size


@contextlib.contextmanager
def one_of_four():
    """Rank 1 of four ranks of cp, whose collectives move nothing and take no memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield make_mesh(cp=4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_integers_of_a_step_take_a_part_of_the_memory(checkpointing, monkeypatch):
    """Of weights: a quarter; of two of them at once all (one fills, one travels), and a quarter of what arrives."""
    monkeypatch.setattr(parts, "BUCKET", 1)
    policy = load_policy("tiny-qwen3")
    shapes = {name: one.numel() * 8 for name, one in policy.model.named_parameters()}
    weights = [size for name, size in shapes.items() if "_proj" in name]
    apart = sum(shapes.values()) - sum(weights)
    with one_of_four() as mesh, LiveIntegers() as integers:
        own_step(mesh, in_order("zigzag"), Resolution(BLOCK), checkpointing=checkpointing)
    attention = 2**16  # of keys and values, and indices of tokens
    rounded = max(weights)  # a partial of the plain kernels, before it is added
    bound = apart + sum(weights) / 4 + 2.25 * max(weights) + rounded + attention
    assert sum(weights) / 4 < integers.most < bound < 0.6 * sum(shapes.values())
    assert integers.now < attention
