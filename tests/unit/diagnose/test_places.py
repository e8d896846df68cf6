"""Places of tokens: edges of shards, ends of documents, later documents of a row."""

import pytest
import torch

from tests.helpers.hand_records import tokens
from workbench.diagnose.places import agreement, places


def numbers(where):
    return where.nonzero().flatten().tolist()


def test_each_place():
    results = {name: numbers(where) for name, where in places(tokens()).items()}
    assert results["document beginnings"] == [2, 8, 14]
    assert results["document ends"] == [5, 11, 16]
    assert results["document starts"] == [0, 6, 12]
    assert results["shard edges"] == [10]  # 11 is predicted on the second rank
    assert results["behind shard edges"] == [11]
    assert results["later documents"] == [8, 9, 10, 11, 14, 15, 16]


def test_a_rank_returns_to_a_document_after_another_has_gone_on():
    there_and_back = tokens() | {"shards": torch.tensor([0, 0, 1, 1, 0, 0] * 3)}
    assert numbers(places(there_and_back)["returns"]) == [4, 5, 10, 11, 16]
    assert numbers(places(tokens())["returns"]) == []


@pytest.mark.parametrize(
    ("first", "expected"), [(11, [8, 9, 10, 11, 14, 15, 16]), (5, [3, 4, 5, 8, 9, 10, 11, 14, 15, 16]), (18, [])]
)
def test_halves_of_the_first_rank(first, expected):
    cut = tokens() | {"shards": (torch.arange(18) >= first).long()}
    assert numbers(places(cut)["behind half a shard"]) == expected


def test_a_rank_with_two_chunks_is_split_in_its_first():
    zigzag = tokens() | {"shards": torch.tensor([0] * 5 + [1] * 9 + [0] * 4)}
    assert numbers(places(zigzag)["behind half a shard"]) == [3, 4, 5, 8, 9, 10, 11, 14, 15, 16]


def test_unrecorded_places_are_left_out():
    laid = {name: values for name, values in tokens().items() if name not in ("shards", "places")}
    of_documents = {"document beginnings", "document ends", "document starts"}
    assert set(places(laid)) == of_documents | {"later documents"}
    del laid["rows"]
    assert set(places(laid)) == of_documents
    assert places({"trained": laid["trained"]}) == {}


def test_tokens_after_a_feature_end_with_its_document():
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
