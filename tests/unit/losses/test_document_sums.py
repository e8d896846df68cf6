"""Sums over documents, turns and pairs: values, adjoints, and what is refused."""

import math

import pytest
import torch

from tests.helpers.loss_batches import nasty_documents, packed
from tests.oracles.surrogates import counted, runs_of
from workbench.errors import SpecError
from workbench.losses.document_sums import (
    LocalSums,
    document_totals,
    mean_of_document_means,
    pair_signs,
    segment_ids,
)


def row(documents):
    _, inputs = packed(documents)
    return LocalSums(
        inputs.document_ids_T, inputs.loss_mask_T, group_ids_T=inputs.group_ids_T, rewards_T=inputs.rewards_T
    )


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
    sums = LocalSums(torch.tensor([0, 0, 0, 1, 1]), mask_T)
    ones_T = torch.ones(5)
    assert sums.segment(ones_T).tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert sums.document(ones_T).tolist() == [2.0, 2.0, 2.0, 0.0, 0.0]


def test_a_run_ends_with_its_document_even_if_the_next_begins_at_once():
    ids = segment_ids(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([True, True, True, False, True]))
    assert ids.tolist() == [0, 0, 1, -1, 2]


def test_a_row_without_tokens():
    sums = LocalSums(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool))
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
    sums_T = LocalSums(ids_T, mask_T, group_ids_T=groups_T, rewards_T=rewards_T).pair(values_T)
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
def test_what_is_no_pair_is_refused(changes, found):
    with pytest.raises(SpecError, match=found):
        pair_signs(*pair(**changes))


def test_a_group_in_which_nothing_counts_needs_to_be_no_pair():
    assert pair_signs(*pair(groups=(4, 5), mask=(0, 0, 0, 0))).tolist() == [0.0] * 4


def test_pairs_need_groups_and_rewards():
    ids_T, *_, mask_T = pair()
    with pytest.raises(SpecError, match="no group_ids or no rewards"):
        LocalSums(ids_T, mask_T).pair(torch.zeros(4))


def test_totals_are_one_a_document_and_their_adjoint_goes_to_trained_tokens():
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
