"""Schedules hold torch's orders and one order of transfers; results of some stages reach all."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import schedules as of_torch

from workbench.errors import ShardingError
from workbench.sharding.pipeline import (
    Action,
    schedule,
    share_json,
    share_tensors,
    start_receive,
    start_send,
    sum_of_ends,
)
from workbench.sharding.simulated import simulate

SIZES = [(ranks, micro_batches) for ranks in (1, 2, 3, 4) for micro_batches in (1, 2, 3, 4, 5, 7, 8, 12)]
KINDS = {"forward": "F", "backward": "B"}


def computations(actions):
    return [(action.stage, KINDS[action.kind], action.micro_batch) for action in actions if action.kind in KINDS]


def as_plain(order):
    kinds = KINDS.values()
    return [(a[0], a[1].value, a[2]) for a in order if a is not None and a[1].value in kinds]


def everything(name, ranks, stages_per_rank, micro_batches):
    return schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_gpipe_is_torchs_order(ranks, micro_batches):
    if not hasattr(of_torch.ScheduleGPipe, "_get_pipeline_order"):
        pytest.skip("this torch does not state the order")
    order = of_torch.ScheduleGPipe._get_pipeline_order(
        SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches)
    )
    own = everything("gpipe", ranks, 1, micro_batches)
    assert [computations(actions) for actions in own] == [as_plain(order[rank]) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(r, n) for r, n in SIZES if n >= r > 1])
def test_1f1b_is_torchs_order(ranks, micro_batches):
    if not hasattr(of_torch.Schedule1F1B, "_get_pipeline_order"):
        pytest.skip("this torch does not state the order")
    order = of_torch.Schedule1F1B._get_pipeline_order(SimpleNamespace(_num_stages=ranks, _n_microbatches=micro_batches))
    own = [computations(actions) for actions in everything("1f1b", ranks, 1, micro_batches)]
    assert own[:-1] == [as_plain(order[rank]) for rank in range(ranks - 1)]
    # torch 2.13 states micro-batches 1 to n of the last stage, one too many, and runs 0 to n - 1.
    assert own[-1] == [(ranks - 1, kind, at) for at in range(micro_batches) for kind in "FB"]


@pytest.mark.parametrize("stages_per_rank", [2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(r, n) for r, n in SIZES if n % max(1, n // r) == 0 and r > 1])
def test_interleaved_is_torchs_order(ranks, micro_batches, stages_per_rank):
    kind = of_torch.ScheduleInterleaved1F1B
    if not hasattr(kind, "_calculate_single_rank_operations"):
        pytest.skip("this torch does not state the order")
    together = micro_batches // max(1, micro_batches // ranks)
    sizes = SimpleNamespace(
        n_local_stages=stages_per_rank,
        microbatches_per_round=together,
        pp_group_size=ranks,
        _n_microbatches=micro_batches,
    )
    own = everything("interleaved_1f1b", ranks, stages_per_rank, micro_batches)
    for rank in range(ranks):
        assert computations(own[rank]) == as_plain(kind._calculate_single_rank_operations(sizes, rank))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(r, n) for r, n in SIZES if r > 1])
def test_ranks_that_wait_at_every_transfer_end(name, ranks, micro_batches):
    """Every micro-batch passes every stage once each way, after its input, though each transfer waits for its peer."""
    stages = ranks * (2 if name == "interleaved_1f1b" else 1)
    pending = [list(actions) for actions in everything(name, ranks, stages // ranks, micro_batches)]
    done = set()
    peers = {
        "send activation": ("receive activation", 1),
        "send gradient": ("receive gradient", -1),
    }
    while any(pending):
        before = sum(map(len, pending))
        for actions in pending:
            if not actions:
                continue
            kind, stage, at = actions[0]
            if kind in ("forward", "backward"):
                step = -1 if kind == "forward" else 1
                needs = (kind, stage + step, at) if 0 <= stage + step < stages else None
                if kind == "backward" and needs is None:
                    needs = ("forward", stage, at)
                if needs is not None:
                    elsewhere = (stage + step) % ranks != stage % ranks and needs[1] != stage
                    arrived = Action("receive activation" if kind == "forward" else "receive gradient", stage, at)
                    assert (arrived in done) if elsewhere else (needs in done)
                done.add((kind, stage, at))
                actions.pop(0)
            elif kind in peers:
                receive, step = peers[kind]
                assert (kind.replace("send activation", "forward").replace("send gradient", "backward"), stage, at) in (
                    done
                )
                peer = pending[(stage + step) % ranks]
                if peer and peer[0] == Action(receive, stage + step, at):
                    done.add(peer.pop(0))
                    actions.pop(0)
        assert sum(map(len, pending)) < before, f"all ranks wait: {[actions[:1] for actions in pending]}"
    for kind in KINDS:
        assert {(kind, stage, at) for stage in range(stages) for at in range(micro_batches)} <= done


def test_an_unknown_schedule_is_refused_by_name():
    with pytest.raises(ShardingError, match="zero-bubble schedules split") as caught:
        everything("zero_bubble", 2, 1, 2)
    assert "one of gpipe, 1f1b, interleaved_1f1b" in str(caught.value)


def test_transfers_reach_the_neighbouring_stage():
    def rank(mesh):
        axis, like = mesh["pp"], torch.empty(3)
        if axis.rank == 0:
            start_send(torch.tensor([1.0, 2.0, 3.0]), Action("send activation", 0, 4), axis)()
            return start_receive(like, Action("receive gradient", 0, 4), axis)()
        value = start_receive(like, Action("receive activation", 1, 4), axis)()
        start_send(10 * value, Action("send gradient", 1, 4), axis)()
        return value

    first, second = simulate(rank, pp=2)
    assert (first.tolist(), second.tolist()) == ([10.0, 20.0, 30.0], [1.0, 2.0, 3.0])


def test_results_of_some_stages_are_on_all():
    def rank(mesh):
        at = mesh["pp"].rank
        own = {0: {"both": torch.tensor([1.0]), "int": torch.tensor([[7, 8]])}, 1: {}}.get(
            at, {"both": torch.tensor([1.0]), "flag": torch.tensor([True, False]), "number": torch.tensor(0.1).double()}
        )
        return share_tensors(own, mesh), share_json({"rank": at, "nan": float("nan"), "tenth": 0.1}, mesh)

    for tensors, values in simulate(rank, pp=3):
        assert {name: (value.dtype, value.tolist()) for name, value in tensors.items()} == {
            "both": (torch.float32, [1.0]),
            "int": (torch.int64, [[7, 8]]),
            "flag": (torch.bool, [True, False]),
            "number": (torch.float64, float(torch.tensor(0.1).double())),
        }
        assert [value["rank"] for value in values] == [0, 1, 2]
        assert values[2]["tenth"] == 0.1
        assert values[1]["nan"] != values[1]["nan"]


def test_both_ends_have_the_same_bits_of_their_sum():
    def rank(mesh):
        values = [torch.full((2,), 0.1 * (1 + mesh["pp"].rank)), torch.tensor(float(mesh["pp"].rank))]
        sum_of_ends(values, mesh["pp"])
        return values

    first, middle, last = simulate(rank, pp=3)
    assert torch.equal(first[0], last[0])
    assert float(first[0][0]) == pytest.approx(0.4)
    assert (float(first[1]), float(middle[1]), float(last[1])) == (2.0, 1.0, 2.0)
    assert float(middle[0][0]) == pytest.approx(0.2)
