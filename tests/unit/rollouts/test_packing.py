"""Packing: every document in exactly one row, whole; rows are level, padded, never empty."""

import random

import numpy as np
import pytest
import torch

from workbench.errors import SpecError
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.packing import EVEN, LEAST_CHANGE, balance_rows, deal, fill, pack


def make_batch(lengths) -> RolloutBatch:
    return RolloutBatch.from_documents(
        [
            {
                "tokens": [number + 1] * length,
                "loss_mask": [0] + [1] * (length - 1),
                "advantages": float(number),
                "old_logprobs": [-1.0] * length,
            }
            for number, length in enumerate(lengths)
        ]
    )


def test_one_row_keeps_the_order():
    batch = make_batch([3, 1, 2])
    (row,) = pack(batch)
    assert row.tokens_T.tolist() == batch.tokens_T.tolist()
    assert row.source_T.tolist() == [0, 1, 2, 3, 4, 5]


def test_longest_first_to_the_shortest_row():
    rows = pack(make_batch([5, 3, 4, 2]), rows=2)
    assert [row.tokens_T.tolist() for row in rows] == [[1] * 5 + [4] * 2, [2] * 3 + [3] * 4]


def test_every_token_is_placed_exactly_once():
    batch = make_batch([7, 1, 12, 3, 3, 5, 9])
    rows = pack(batch, rows=3, multiple_of=4)
    results = sorted(source for row in rows for source in row.source_T.tolist() if source >= 0)
    assert results == list(range(batch.num_tokens))
    for row in rows:
        real = row.source_T >= 0
        assert row.tokens_T[real].tolist() == batch.tokens_T[row.source_T[real]].tolist()


def test_rows_are_padded_to_the_multiple():
    rows = pack(make_batch([5, 3]), rows=2, multiple_of=4)
    assert [row.num_tokens for row in rows] == [8, 4]
    assert [int(row.lengths_N.sum()) for row in rows] == [5, 3]


def test_more_rows_than_documents_gives_rows_of_padding():
    rows = pack(make_batch([2]), rows=3, multiple_of=4)
    assert [row.num_tokens for row in rows] == [4, 4, 4]
    assert [row.num_trained_tokens for row in rows] == [1, 0, 0]


def test_a_row_without_tokens_is_never_made():
    assert pack(make_batch([2]), rows=2)[1].num_tokens == 1


@pytest.mark.parametrize("settings", [{"rows": 0}, {"multiple_of": 0}, {"document_multiple_of": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SpecError, match="all are at least 1"):
        pack(make_batch([2]), **settings)


def documents_of(rows):
    """Return the documents of each row, by the token that names them."""
    return [sorted({token - 1 for token in row.tokens_T[row.source_T >= 0].tolist()}) for row in rows]


def test_labelled_documents_share_a_row():
    batch, pairs = make_batch([9, 2, 8, 2, 7, 2]), torch.tensor([5, 5, 3, 3, 4, 4])
    assert documents_of(pack(batch, rows=3)) != [[0, 1], [2, 3], [4, 5]]
    assert documents_of(pack(batch, rows=3, group_labels_N=pairs)) == [[0, 1], [2, 3], [4, 5]]
    apart = torch.tensor([1, 2, 2, 3, 3, 1])
    assert documents_of(pack(batch, rows=3, group_labels_N=apart)) == [[0, 5], [1, 2], [3, 4]]


def excess(rows):
    """Largest tokens, and squared lengths, of a row over those of the mean one."""
    of_rows = [[float(row.lengths_N.sum()) for row in rows], [float((row.lengths_N**2).sum()) for row in rows]]
    return [max(values) * len(values) / sum(values) for values in of_rows]


def test_rows_of_equal_work_have_equal_attention_too():
    draw = random.Random(1)
    batch = make_batch([round(2 ** draw.uniform(3, 8)) for _ in range(40)])
    plain, level_rows = pack(batch, rows=4), pack(batch, rows=4, balance="work")
    assert excess(plain)[1] > 1.04
    assert max(excess(level_rows)) < 1.02
    assert sorted(number for row in documents_of(level_rows) for number in row) == list(range(40))
    assert [row.tokens_T.tolist() for row in level_rows] == [sorted(row.tokens_T.tolist()) for row in level_rows], (
        "within a row documents keep their order"
    )


def test_work_is_that_of_tokens_where_one_document_has_most_of_it():
    rows = pack(make_batch([64, 2, 2, 2, 2, 2, 2]), rows=2, balance="work")
    assert documents_of(rows) == [[0], [1, 2, 3, 4, 5, 6]]


def test_documents_with_a_label_change_places_together():
    draw = random.Random(2)
    batch = make_batch([draw.randint(1, 60) for _ in range(24)])
    pairs = torch.arange(24) // 2
    rows = documents_of(pack(batch, rows=3, group_labels_N=pairs, balance="work"))
    assert rows != documents_of(pack(batch, rows=3, group_labels_N=pairs))
    assert all(sorted(set(row) ^ {number ^ 1 for number in row}) == [] for row in rows)


def unevenness(costs, row_of, rows):
    """Sum over rows and costs of the squared share of the mean row, one row at a time: the slow way."""
    return sum(
        (sum(cost for cost, at in zip(of_items, row_of, strict=True) if at == row) * rows / sum(of_items)) ** 2
        for of_items in costs
        for row in range(rows)
    )


@pytest.mark.parametrize("seed", range(6))
def test_no_change_is_left_that_would_level_the_fullest_row(seed):
    draw = random.Random(seed)
    rows, items = draw.randint(2, 4), draw.randint(1, 14)
    lengths = [draw.randint(1, 50) for _ in range(items)]
    costs = [lengths, [length**2 for length in lengths]]
    start = [draw.randrange(rows) for _ in range(items)]
    found = balance_rows(np.array(costs, dtype=float), start, rows)
    least = unevenness(costs, found, rows)
    assert least <= unevenness(costs, start, rows)
    totals = [
        [sum(c for c, at in zip(each, found, strict=True) if at == row) * rows / sum(each) for each in costs]
        for row in range(rows)
    ]
    fullest = max(range(rows), key=lambda row: max(totals[row]))
    for item in [item for item in range(items) if found[item] == fullest and max(totals[fullest]) > 1 + EVEN]:
        for row in range(rows):
            assert unevenness(costs, [*found[:item], row, *found[item + 1 :]], rows) > least - 2 * LEAST_CHANGE
        for other in range(items):
            swapped = list(found)
            swapped[item], swapped[other] = found[other], found[item]
            assert unevenness(costs, swapped, rows) > least - 2 * LEAST_CHANGE


def test_many_rows_are_level():
    draw = random.Random(3)
    lengths = [2 ** draw.uniform(6, 11) for _ in range(2000)]
    costs = np.array([lengths, [length**2 for length in lengths]])
    totals = np.array(
        [np.bincount(balance_rows(costs, [n % 100 for n in range(2000)], 100), each, 100) for each in costs]
    )
    assert (totals / totals.mean(1, keepdims=True)).max() < 1.01


def test_nothing_is_levelled_without_cost():
    assert balance_rows(np.zeros((2, 3)), [0, 1, 1], 2) == [0, 1, 1]
    assert balance_rows(np.zeros((2, 0)), [], 2) == []
    assert balance_rows(np.ones((2, 3)), [0, 0, 0], 1) == [0, 0, 0]


def test_micro_batches_are_taken_in_order_until_no_document_is_left():
    batch = make_batch([5, 3, 4, 2, 7, 1])
    assert documents_of(fill(batch, tokens=8)) == [[0, 1], [2, 3], [4, 5]]
    assert documents_of(fill(batch, tokens=9)) == [[0, 1], [2, 3], [4, 5]]
    assert documents_of(fill(batch, tokens=22)) == [[0, 1, 2, 3, 4, 5]]


def test_every_rank_takes_equally_many_and_the_last_may_be_empty():
    rows = fill(make_batch([5, 3, 4, 2, 7, 1]), tokens=8, ranks=2, multiple_of=4)
    assert documents_of(rows) == [[0, 1], [4, 5], [2, 3], []], "rank 0: first and third micro-batch; rank 1: second"
    assert [row.num_tokens for row in rows] == [8, 8, 8, 4]


def test_padding_never_takes_a_row_over_its_size():
    rows = fill(make_batch([5, 2, 5, 2]), tokens=10, multiple_of=4)
    assert [row.num_tokens for row in rows] == [8, 8]
    assert documents_of(rows) == [[0, 1], [2, 3]]


def test_labelled_documents_are_taken_as_a_whole():
    batch, pairs = make_batch([5, 3, 4, 2]), torch.tensor([0, 1, 0, 1])
    assert documents_of(fill(batch, tokens=9)) == [[0, 1], [2, 3]]
    assert documents_of(fill(batch, tokens=9, group_labels_N=pairs)) == [[0, 2], [1, 3]]


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(SpecError, match=r"document\(s\) \[1\] of 9 tokens(.|\n)*allow at least 12 tokens"):
        fill(make_batch([2, 9]), tokens=11, multiple_of=4)
    with pytest.raises(SpecError, match=r"document\(s\) \[0, 1\] of 11 tokens"):
        fill(make_batch([2, 9]), tokens=10, group_labels_N=torch.tensor([0, 0]))


def test_documents_are_dealt_in_the_given_rows_and_order():
    batch = make_batch([5, 3, 4, 2])
    rows = deal(batch, [[3, 0], [], [2, 1]], multiple_of=4)
    assert [row.tokens_T.tolist() for row in rows] == [[4] * 2 + [1] * 5 + [0], [0] * 4, [3] * 4 + [2] * 3 + [0]]
    assert rows[0].source_T.tolist() == [12, 13, 0, 1, 2, 3, 4, -1]


@pytest.mark.parametrize("rows", [[[0, 1], [1]], [[0]], [[0, 1, 2]]])
def test_a_document_that_is_dealt_twice_or_never_is_refused(rows):
    with pytest.raises(SpecError, match="each document is in one row"):
        deal(make_batch([5, 3]), rows)


def test_documents_are_padded_where_they_stand():
    (row,) = pack(make_batch([3, 4, 1]), document_multiple_of=4, multiple_of=8)
    assert row.document_ids_T.tolist() == [0, 0, 0, -1, 1, 1, 1, 1, 2, -1, -1, -1, -1, -1, -1, -1]
    assert row.positions_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 2, 3]
    assert row.source_T.tolist() == [0, 1, 2, -1, 3, 4, 5, 6, 7, *[-1] * 7]
    assert row.lengths_N.tolist() == [3, 4, 1]
    assert row.loss_mask_T.sum() == 5


def test_a_row_without_documents_has_none_to_pad():
    rows = pack(make_batch([2]), rows=2, multiple_of=8, document_multiple_of=8)
    assert [row.num_tokens for row in rows] == [8, 8]


def test_rows_are_level_with_the_padding_of_documents():
    # Padded to 8, 8, 8, 4: the two longest no longer go with the shorter ones.
    rows = pack(make_batch([5, 8, 5, 4]), rows=2, document_multiple_of=8)
    assert documents_of(pack(make_batch([5, 8, 5, 4]), rows=2)) == [[1, 3], [0, 2]]
    assert documents_of(rows) == [[0, 2], [1, 3]]
    assert [row.num_tokens for row in rows] == [16, 16]


def test_micro_batches_include_document_padding():
    assert documents_of(fill(make_batch([3, 3, 3]), tokens=9)) == [[0, 1, 2]]
    assert documents_of(fill(make_batch([3, 3, 3]), tokens=9, document_multiple_of=4)) == [[0, 1], [2]]
    with pytest.raises(SpecError, match=r"document\(s\) \[1\] of 12 tokens with their padding to multiples of 4"):
        fill(make_batch([2, 9]), tokens=11, document_multiple_of=4)
