"""Sums over documents, turns and pairs: values, adjoints, and what is refused; on several ranks those of one."""

import math
from dataclasses import replace

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed
from tests.helpers.ranks import reductions_counted, run_ranks
from tests.oracles.surrogates import counted, runs_of
from workbench.errors import SpecError
from workbench.losses.document_sums import (
    DocumentSums,
    document_totals,
    mean_of_document_means,
    pair_signs,
    segment_ids,
)
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import shift_targets
from workbench.sharding.collectives import all_gather, identity_sum, sum_identity, sum_sum
from workbench.sharding.mesh import Axis, make_mesh
from workbench.sharding.plan import ShardPlan


def row(documents):
    _, inputs = packed(documents)
    return DocumentSums(inputs.document_ids_T, inputs.loss_mask_T, inputs.group_ids_T, inputs.rewards_T)


def noise(documents, seed=0):
    """Random values, NaN where nothing counts; per document and as a row."""
    generator = torch.Generator().manual_seed(seed)
    lists = [
        [
            torch.randn((), generator=generator, dtype=torch.float64).item() if on else math.nan
            for on in document["mask"]
        ]
        for document in documents
    ]
    return lists, torch.tensor([v for one in lists for v in one] + [math.nan] * 3, dtype=torch.float64)


def parts(documents, level):
    """Lists of (document, token)."""
    for d, document in enumerate(documents):
        runs = runs_of(document) if level == "segment" else [counted(document)]
        yield from ([(d, t) for t in run] for run in runs)


@pytest.mark.parametrize("level", ["document", "segment"])
def test_sum_and_adjoint(level):
    documents = nasty_documents(0)
    values, values_T = noise(documents)
    values_T.requires_grad_()
    wanted, wanted_T = noise(documents, seed=1)
    sums_T = getattr(row(documents), level)(values_T)
    starts = [sum(len(document["mask"]) for document in documents[:d]) for d in range(len(documents))]
    assert sums_T.isfinite().all()
    (sums_T * wanted_T.nan_to_num(0.0)).sum().backward()
    seen = set()
    for part in parts(documents, level):
        places = [starts[d] + t for d, t in part]
        seen.update(places)
        assert sums_T[places].tolist() == pytest.approx([sum(values[d][t] for d, t in part)] * len(part), abs=1e-14)
        assert values_T.grad[places].tolist() == pytest.approx(
            [sum(wanted[d][t] for d, t in part)] * len(part), abs=1e-14
        )
    others = [t for t in range(len(values_T)) if t not in seen]
    assert torch.equal(values_T.grad[others], torch.zeros(len(others), dtype=torch.float64))


def test_a_token_outside_every_run_has_no_segment_and_an_empty_document_sums_to_0():
    mask_T = torch.tensor([True, False, True, False, False])
    sums = DocumentSums(torch.tensor([0, 0, 0, 1, 1]), mask_T)
    ones_T = torch.ones(5)
    assert sums.segment(ones_T).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert sums.document(ones_T).tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]


def test_a_segment_ends_with_its_document():
    ids = segment_ids(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([True, True, True, False, True]))
    assert ids.tolist() == [0, 0, 1, -1, 2]


def test_a_row_without_tokens():
    sums = DocumentSums(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool))
    assert sums.document(torch.zeros(0)).shape == (0,)
    assert sums.segment(torch.zeros(0)).shape == (0,)


def pair(groups=(4, 4), rewards=(0.0, 1.0), mask=(1, 1, 1, 1)):
    ids_T = torch.tensor([0, 0, 1, 1])
    return (
        ids_T,
        torch.tensor(groups)[ids_T],
        torch.tensor(rewards, dtype=torch.float64)[ids_T],
        torch.tensor(mask).bool(),
    )


def test_a_pair_is_chosen_minus_rejected_on_both():
    ids_T, groups_T, rewards_T, mask_T = pair(mask=(0, 1, 1, 1))
    values_T = torch.tensor([math.nan, 2.0, 5.0, 7.0], dtype=torch.float64, requires_grad=True)
    sums_T = DocumentSums(ids_T, mask_T, groups_T, rewards_T).pair(values_T)
    assert sums_T.tolist() == [10.0] * 4
    sums_T[1].backward()
    assert values_T.grad.tolist() == [0.0, -1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rewards": (1.0, 1.0)}, r"2 document\(s\) with rewards \[1.0, 1.0\]"),
        ({"groups": (4, 5)}, r"1 document\(s\)"),
        ({"mask": (0, 0, 1, 1)}, r"1 document\(s\)"),
    ],
)
def test_an_invalid_pair_is_refused(changes, found):
    with pytest.raises(SpecError, match=found):
        pair_signs(*pair(**changes))


def test_a_group_in_which_nothing_counts_needs_to_be_no_pair():
    assert pair_signs(*pair(groups=(4, 5), mask=(0, 0, 0, 0))).tolist() == [0.0] * 4


def test_pairs_need_groups_and_rewards():
    ids_T, *_, mask_T = pair()
    with pytest.raises(SpecError, match="no group_ids or no rewards"):
        DocumentSums(ids_T, mask_T).pair(torch.zeros(4))


def test_document_totals_send_gradients_to_trained_tokens_only():
    values = torch.tensor([1.0, math.nan, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    mask, ids = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 2])
    totals = document_totals(values, mask, ids, 3)
    assert totals.tolist() == [4.0, 0.0, 4.0]
    totals.backward(torch.tensor([2.0, 5.0, 7.0], dtype=torch.float64))
    assert values.grad.tolist() == [2.0, 0.0, 2.0, 7.0]


def test_a_mean_over_documents_is_undefined_if_one_of_them_is_empty():
    mask, ids = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
    values = torch.tensor([1.0, 9.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    mean = mean_of_document_means(values, mask, ids, 2)
    mean.backward()
    assert mean.item() == 3.0
    assert values.grad.tolist() == [0.25, 0.0, 0.25, 0.5]
    assert math.isnan(mean_of_document_means(values, mask, ids, 3).item())


# -- a row that several ranks share ------------------------------------------------------------------------------

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


def shared(row, positions_t, axis):
    return DocumentSums.of_row(row, positions_t, axis=axis, complete=sum_sum)


def values_and_cotangents(length=28):
    made = torch.Generator().manual_seed(5)
    return torch.randn(2, length, generator=made, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["document", "segment", "pair"])
def test_on_one_rank_they_are_the_local_sums(kind):
    row = make_row()
    values, cotangents = values_and_cotangents()
    values[~row.loss_mask_T] = torch.nan
    expected_of, found_of = values.clone().requires_grad_(), values.clone().requires_grad_()
    expected = getattr(DocumentSums.of_row(row), kind)(expected_of)
    result = getattr(shared(row, torch.arange(28), Axis("cp")), kind)(found_of)
    assert torch.equal(result, expected)
    assert result.abs().sum() > 1
    (expected * cotangents).sum().backward()
    (result * cotangents).sum().backward()
    assert torch.equal(found_of.grad, expected_of.grad)
    assert not found_of.grad[~row.loss_mask_T].any()


def test_a_pair_is_the_chosen_minus_the_rejected():
    row = make_row()
    sums = shared(row, torch.arange(28), Axis("cp")).pair(torch.ones(28))
    lengths = {0: 6.0, 2: 1.0, 3: 9.0, 5: 1.0}
    assert sums[row.document_ids_T == 0].tolist() == [lengths[0] - lengths[3]] * 10
    assert sums[row.document_ids_T == 3].tolist() == [lengths[0] - lengths[3]] * 10
    assert sums[row.document_ids_T == 2].tolist() == [lengths[5] - lengths[2]] * 3


def test_pairs_without_rewards_are_refused():
    sums = shared(make_row(rewards_T=None), torch.arange(28), Axis("cp"))
    with pytest.raises(SpecError, match="no group_ids or no rewards"):
        sums.pair(torch.ones(28))


def test_some_tokens_are_summed_over_and_for_themselves():
    row, half = make_row(), DocumentSums.of_row(make_row(), torch.arange(4, 28))
    trained = torch.nonzero(row.loss_mask_T & (row.document_ids_T == 0))[:, 0]
    assert trained[2:].tolist() == [4, 5, 6, 8]
    some = half.at(torch.tensor([0, 2, 3]))
    assert some.document(torch.ones(3)).tolist() == [2.0] * 3, "positions 4, 6 and 7 of the row, of which 7 is masked"
    assert some.segment(torch.ones(3)).tolist() == [2.0, 2.0, 0.0]


def test_what_stands_in_for_the_sums_gets_their_kind_and_values():
    calls = []
    sums = replace(DocumentSums.of_row(make_row()), instead=lambda kind, values_t: calls.append(kind) or 2 * values_t)
    assert [float(getattr(sums, kind)(torch.ones(28))[0]) for kind in ("pair", "document", "segment")] == [2.0] * 3
    assert calls == ["pair", "document", "segment"]


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
    sums = shared(row, plan.positions(axis.rank), axis)
    if complete != "right":
        sums = replace(sums, complete=WRONG[complete])
    out = {}
    for kind in ("document", "segment", "pair"):
        values, cotangents = (plan.split(v, axis.rank) for v in values_and_cotangents(length))
        values[~plan.split(row.loss_mask_T, axis.rank)] = torch.inf
        values.requires_grad_()
        with reductions_counted() as calls:
            result = getattr(sums, kind)(values)
            (result * cotangents).sum().backward()
        out[kind] = {
            "calls": calls,
            "parts": sums._parts[kind].count,
            "sums": plan.merge(torch.cat(all_gather(result.detach(), axis))),
            "gradients": plan.merge(torch.cat(all_gather(values.grad, axis))),
        }
    return out


def truth(kind, length):
    row = make_row(length)
    values, cotangents = values_and_cotangents(length)
    values.requires_grad_()
    sums = getattr(DocumentSums.of_row(row), kind)(values)
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
            result = answer[kind]
            torch.testing.assert_close(result["sums"], expected, rtol=0, atol=1e-14, msg=f"{kind}, rank {rank}")
            torch.testing.assert_close(result["gradients"], gradients, rtol=0, atol=1e-14, msg=f"{kind}, rank {rank}")
            assert result["calls"] == [result["parts"]] * 2, "one collective forward, one backward, of one vector"


def wrong_ones(order, length):
    return {name: sums_of_a_shard(order, length, name) for name in WRONG}


@pytest.mark.parametrize(("world", "order", "length"), [(2, "contiguous", 32), (4, "zigzag", 32)])
def test_every_other_pairing_is_wrong_as_documented(world, order, length, tmp_path):
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
