"""Two encodings of one completion: where they differ, with and without the text of the ids."""

import json

import pytest

from workbench.errors import RecordError, SpecError
from workbench.rollouts.vocabulary import Differing, decoded, differing_runs, read_vocabulary

VOCABULARY = ["a", "b", "c", "ab", "bc", "abc", "", "d"]


def test_equal_encodings_have_no_run():
    assert differing_runs((0, 1), [0, 1]) == []
    assert differing_runs((0, 1), [0, 1], VOCABULARY) == []


def test_runs_of_the_same_text_lie_between_common_ends():
    # a bc d | ab c d: the middle is split otherwise, d is in both
    assert differing_runs((0, 4, 7), (3, 2, 7), VOCABULARY) == [Differing(0, (0, 4), (3, 2), "abc")]
    found = differing_runs((7, 5, 7, 0, 1), (7, 0, 4, 7, 3), VOCABULARY)
    assert found == [Differing(1, (5,), (0, 4), "abc"), Differing(3, (0, 1), (3,), "ab")]


def test_a_token_without_text_belongs_to_the_run_before_it():
    assert differing_runs((0, 6, 1), (0, 1), VOCABULARY) == [Differing(0, (0, 6), (0,), "a")]
    assert differing_runs((0, 1), (0, 1, 6), VOCABULARY) == [Differing(1, (1,), (1, 6), "b")]


def test_other_text_and_no_vocabulary_are_compared_by_place():
    assert differing_runs((0, 1, 2), (0, 7, 2), VOCABULARY) == [Differing(1, (1,), (7,))]
    assert differing_runs((0, 4, 7), (3, 2, 7)) == [Differing(0, (0, 4), (3, 2))]
    assert differing_runs((0, 1, 2, 3), (1, 1, 0, 0)) == [Differing(0, (0,), (1,)), Differing(2, (2, 3), (0, 0))]
    assert differing_runs((0, 1), (0, 1, 7)) == [Differing(2, (), (7,))]
    assert differing_runs((0, 0, 1), (0, 1)) == [Differing(1, (0,), ())]
    assert differing_runs((2, 3, 7, 7), (2, 5, 7)) == [Differing(1, (3, 7), (5,))]


def test_an_id_beyond_the_vocabulary_is_refused():
    assert decoded([5, 0], VOCABULARY) == ["abc", "a"]
    with pytest.raises(SpecError, match=r"id 8(.|\n)*0 to 7"):
        decoded([0, 8], VOCABULARY)
    with pytest.raises(SpecError, match="id -1"):
        decoded([-1], VOCABULARY)


def test_a_vocabulary_is_a_json_list_of_texts(tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(VOCABULARY))
    assert read_vocabulary(path) == VOCABULARY
    path.write_text("[1]")
    with pytest.raises(RecordError, match="a JSON list with the text of each id"):
        read_vocabulary(path)
    with pytest.raises(RecordError, match="FileNotFoundError"):
        read_vocabulary(tmp_path / "nowhere.json")
