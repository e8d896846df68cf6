"""Sums over whole documents: on one rank those of `LocalSums`, on several the same, with the adjoint of a sum."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.ranks import reductions_counted, run_ranks
from workbench.errors import SpecError
from workbench.losses.document_sums import LocalSums
from workbench.reduction.document_sums import ShardedSums
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.sharding.collectives import all_gather, identity_sum, sum_identity, sum_sum
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.plan import ShardPlan

MASKS = [[0, 1, 1, 0, 0, 1, 1, 1, 0, 1], [0], [0, 0, 1], [0] + 9 * [1], [0, 0], [0, 1]]
GROUPS, REWARDS = [1, 3, 2, 1, 3, 2], [1.0, 0.0, 0.0, 0.5, 0.0, 2.0]


def make_row(length=28, **changes):
    documents = [
        {
            "tokens": [1] * len(m),
            "loss_mask": m,
            "advantages": 1.0,
            "old_logprobs": [-1.0] * len(m),
            "group_id": g,
            "reward": r,
        }
        for m, g, r in zip(MASKS, GROUPS, REWARDS, strict=True)
    ]
    return replace(shift_targets(RolloutBatch.from_documents(documents).pad_to(length)), **changes)


def local(row):
    return LocalSums(row.document_ids_T, row.loss_mask_T, group_ids_T=row.group_ids_T, rewards_T=row.rewards_T)


def values_and_cotangents(length=28):
    made = torch.Generator().manual_seed(5)
    return torch.randn(2, length, generator=made, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["document", "segment", "pair"])
def test_on_one_rank_they_are_the_local_sums(kind):
    row = make_row()
    values, cotangents = values_and_cotangents()
    values[~row.loss_mask_T] = torch.nan
    expected_of, found_of = values.clone().requires_grad_(), values.clone().requires_grad_()
    expected = getattr(local(row), kind)(expected_of)
    found = getattr(ShardedSums(row, torch.arange(28), Axis("cp")), kind)(found_of)
    assert torch.equal(found, expected)
    assert found.abs().sum() > 1
    (expected * cotangents).sum().backward()
    (found * cotangents).sum().backward()
    assert torch.equal(found_of.grad, expected_of.grad)
    assert not found_of.grad[~row.loss_mask_T].any()


def test_a_pair_is_the_chosen_minus_the_rejected():
    row = make_row()
    sums = ShardedSums(row, torch.arange(28), Axis("cp")).pair(torch.ones(28))
    lengths = {0: 6.0, 2: 1.0, 3: 9.0, 5: 1.0}
    assert sums[row.document_ids_T == 0].tolist() == [lengths[0] - lengths[3]] * 10
    assert sums[row.document_ids_T == 3].tolist() == [lengths[0] - lengths[3]] * 10
    assert sums[row.document_ids_T == 2].tolist() == [lengths[5] - lengths[2]] * 3


def test_pairs_without_rewards_are_refused():
    sums = ShardedSums(make_row(rewards_T=None), torch.arange(28), Axis("cp"))
    with pytest.raises(SpecError, match="no group_ids or no rewards"):
        sums.pair(torch.ones(28))


WRONG = {
    "sum_identity": sum_identity,
    "identity_sum": identity_sum,
    "no_reduce": lambda partial, axis: partial,
    "averaged": lambda partial, axis: sum_sum(partial, axis) / axis.size,
}
"""Every other pairing of a forward and a backward."""


def sums_of_a_shard(order, length, complete="right"):
    """Sums, gradients and number of collectives of this rank, back in the order of the row."""
    import torch.distributed as dist

    axis = make_mesh(cp=dist.get_world_size())["cp"]
    plan = ShardPlan.make(order, num_tokens=length, cp=axis.size)
    row = make_row(length)
    sums = ShardedSums(row, plan.positions(axis.rank), axis)
    if complete != "right":
        sums = replace(sums, complete=WRONG[complete])
    out = {}
    for kind in ("document", "segment", "pair"):
        values, cotangents = (plan.split(v, axis.rank) for v in values_and_cotangents(length))
        values[~plan.split(row.loss_mask_T, axis.rank)] = torch.inf
        values.requires_grad_()
        with reductions_counted() as calls:
            found = getattr(sums, kind)(values)
            (found * cotangents).sum().backward()
        out[kind] = {
            "calls": calls,
            "parts": sums.__dict__[f"_{kind}s"].count,
            "sums": plan.merge(torch.cat(all_gather(found.detach(), axis))),
            "gradients": plan.merge(torch.cat(all_gather(values.grad, axis))),
        }
    return out


def truth(kind, length):
    row = make_row(length)
    values, cotangents = values_and_cotangents(length)
    values.requires_grad_()
    sums = getattr(local(row), kind)(values)
    (sums * cotangents).sum().backward()
    return sums.detach(), values.grad


@pytest.mark.parametrize(
    ("world", "order", "length"),
    [(2, "contiguous", 32), (2, "zigzag", 28), (4, "contiguous", 28), (4, "zigzag", 32), (4, "contiguous", 48)],
)  # the last: one rank holds padding only
def test_documents_that_straddle_ranks_get_the_whole_sum_and_the_whole_gradient(world, order, length, tmp_path):
    answers = run_ranks(sums_of_a_shard, world, tmp_path, order, length)
    for kind in ("document", "segment", "pair"):
        expected, gradients = truth(kind, length)
        for rank, answer in enumerate(answers):
            found = answer[kind]
            torch.testing.assert_close(found["sums"], expected, rtol=0, atol=1e-14, msg=f"{kind}, rank {rank}")
            torch.testing.assert_close(found["gradients"], gradients, rtol=0, atol=1e-14, msg=f"{kind}, rank {rank}")
            assert found["calls"] == [found["parts"]] * 2, "one collective forward, one backward, of one vector"


def wrong_ones(order, length):
    return {name: sums_of_a_shard(order, length, name) for name in WRONG}


@pytest.mark.parametrize(("world", "order", "length"), [(2, "contiguous", 32), (4, "zigzag", 32)])
def test_every_other_pairing_is_wrong_in_the_way_that_it_says(world, order, length, tmp_path):
    answers = run_ranks(wrong_ones, world, tmp_path, order, length)
    for kind in ("document", "segment", "pair"):
        sums, gradients = truth(kind, length)

        def far(name, what, right, kind=kind):
            return [float((answer[name][kind][what] - right).abs().max()) > 1e-3 for answer in answers]

        assert not any(far("sum_identity", "sums", sums))
        assert all(far("sum_identity", "gradients", gradients)), kind
        assert all(far("identity_sum", "sums", sums)), kind
        assert not any(far("identity_sum", "gradients", gradients))
        assert all(far("no_reduce", "sums", sums)), kind
        assert all(far("no_reduce", "gradients", gradients)), kind
        for answer in answers:
            torch.testing.assert_close(answer["averaged"][kind]["sums"], sums / world, rtol=0, atol=1e-14)
            torch.testing.assert_close(answer["averaged"][kind]["gradients"], gradients / world, rtol=0, atol=1e-14)
