"""Packing: every document in exactly one row, whole; rows are level, padded, never empty."""

import pytest

from workbench.errors import SpecError
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.packing import pack


def make_batch(lengths) -> RolloutBatch:
    return RolloutBatch.from_documents([
        {"tokens": [number + 1] * length, "loss_mask": [0] + [1] * (length - 1), "advantages": float(number),
         "old_logprobs": [-1.0] * length} for number, length in enumerate(lengths)])


def test_one_row_keeps_the_order():
    batch = make_batch([3, 1, 2])
    (row,) = pack(batch)
    assert row.tokens_T.tolist() == batch.tokens_T.tolist()
    assert row.source_T.tolist() == [0, 1, 2, 3, 4, 5]


def test_longest_first_to_the_shortest_row():
    rows = pack(make_batch([5, 3, 4, 2]), rows=2)
    assert [row.tokens_T.tolist() for row in rows] == [[1] * 5 + [4] * 2, [2] * 3 + [3] * 4]


def test_every_token_lands_once():
    batch = make_batch([7, 1, 12, 3, 3, 5, 9])
    rows = pack(batch, rows=3, multiple_of=4)
    found = sorted(source for row in rows for source in row.source_T.tolist() if source >= 0)
    assert found == list(range(batch.num_tokens))
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


@pytest.mark.parametrize("settings", [{"rows": 0}, {"multiple_of": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(SpecError, match="both are at least 1"):
        pack(make_batch([2]), **settings)
