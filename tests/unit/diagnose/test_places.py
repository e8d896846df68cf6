"""Where tokens lie: edges of shards, ends of documents, later documents of a row."""

import pytest
import torch

from tests.helpers.hand_records import tokens
from workbench.diagnose.places import agreement, places


def numbers(where):
    return where.nonzero().flatten().tolist()


def test_each_place():
    found = {name: numbers(where) for name, where in places(tokens()).items()}
    assert found["document beginnings"] == [2, 8, 14]
    assert found["document ends"] == [5, 11, 16]
    assert found["document starts"] == [0, 6, 12]
    assert found["shard edges"] == [10]  # 11 is predicted on the second rank
    assert found["behind shard edges"] == [11]
    assert found["later documents"] == [8, 9, 10, 11, 14, 15, 16]


def test_a_rank_returns_to_a_document_after_another_has_gone_on():
    there_and_back = tokens() | {"shards": torch.tensor([0, 0, 1, 1, 0, 0] * 3)}
    assert numbers(places(there_and_back)["returns"]) == [4, 5, 10, 11, 16]
    assert numbers(places(tokens())["returns"]) == []


@pytest.mark.parametrize(
    ("first", "expected"), [(11, [8, 9, 10, 11, 14, 15, 16]), (5, [3, 4, 5, 8, 9, 10, 11, 14, 15, 16]), (18, [])]
)
def test_halves_of_what_the_first_rank_holds(first, expected):
    cut = tokens() | {"shards": (torch.arange(18) >= first).long()}
    assert numbers(places(cut)["behind half a shard"]) == expected


def test_a_rank_that_holds_two_stretches_is_cut_in_its_first():
    zigzag = tokens() | {"shards": torch.tensor([0] * 5 + [1] * 9 + [0] * 4)}
    assert numbers(places(zigzag)["behind half a shard"]) == [3, 4, 5, 8, 9, 10, 11, 14, 15, 16]


def test_what_was_not_recorded_is_left_out():
    laid = {name: values for name, values in tokens().items() if name not in ("shards", "places")}
    assert set(places(laid)) == {"document beginnings", "document ends", "document starts"}
    assert places({"trained": laid["trained"]}) == {}


def test_what_is_behind_a_feature_begins_at_the_token_after_it_and_ends_with_its_document():
    trained = torch.tensor([0, 1, 1, 1, 1, 0, 1, 1], dtype=torch.bool)
    laid = {
        "trained": trained,
        "documents": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        "features": torch.tensor([-1, 4, 5, -1, 7, -1, -1, -1]),
    }
    assert numbers(places(laid)["behind features"]) == [2, 3, 6, 7]


@pytest.mark.parametrize(
    ("where", "place", "expected"),
    [
        ([1, 1, 0, 0], [1, 1, 0, 0], 1.0),
        ([1, 0, 0, 0], [0, 1, 1, 1], 0.0),
        ([1, 0, 0, 0], [1, 1, 0, 0], 1.25 * 0.5 / 0.75),
        ([1, 1, 0, 0], [1, 0, 0, 0], 1.25 * 0.5 / 1.125),
    ],
)
def test_agreement_counts_precision_more(where, place, expected):
    assert agreement(torch.tensor(where).bool(), torch.tensor(place).bool()) == pytest.approx(expected)
