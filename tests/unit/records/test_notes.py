"""Names, places and numbers of noted values."""

import pytest
import torch

from workbench.errors import RecordError, ShapeError
from workbench.records.notes import Notes, check_names, in_places, metric_value, of_parts
from workbench.records.trainer_files import TOKENS
from workbench.sharding.mesh import Axis


def test_every_name_of_the_table_is_accepted_and_others_name_the_nearest():
    check_names(TOKENS)
    with pytest.raises(ShapeError, match="rename it to 'policy_logprobs'"):
        check_names(["trained", "policy_logprob"])
    with pytest.raises(ShapeError, match="leave it out, or give it as a metric"):
        check_names(["zzz"])


def test_values_go_to_their_places_and_padding_nowhere():
    source = torch.tensor([3, -1, 0])
    given = {"source": source, "documents": torch.tensor([1, 9, 0]), "trained": torch.tensor([True, True, False])}
    placed, repeated = in_places(given)
    assert repeated == 0
    assert placed["documents"].tolist() == [0, -1, -1, 1]
    assert placed["trained"].tolist() == [False, False, False, True]
    assert "source" not in placed
    assert in_places({"source": source[:0], "trained": given["trained"][:0]})[0]["trained"].tolist() == []


def test_of_tokens_with_one_place_the_first_is_kept_and_the_others_are_counted():
    source = torch.tensor([1, 3, 1, -1, 0, 1])
    placed, repeated = in_places({"source": source, "rows": torch.arange(6), "trained": torch.ones(6)})
    assert placed["rows"].tolist() == [4, 0, -1, 1]
    assert repeated == 2


def test_a_metric_is_a_number():
    assert metric_value("loss", torch.tensor(0.5)) == 0.5
    with pytest.raises(RecordError, match="a metric is a number"):
        metric_value("stage", "warm")


def test_metrics_that_calls_or_ranks_note_with_several_values_are_of_parts():
    ranks = [{"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 2.5}]
    assert of_parts(ranks, [["c"], []]) == ["b", "c"]
    assert of_parts(ranks[:1], [[]]) == []


def test_notes_of_a_step_as_a_rank_sends_them():
    notes = Notes()
    assert not notes
    notes.add(torch.tensor(0.5), {"documents": 2}, {"kl": 1.0}, {"trained": torch.tensor([[True, False]])})
    notes.add(None, None, {"kl": 2.0}, {"trained": torch.tensor([True])})
    assert notes
    assert notes.as_json() == {
        "counts": [{"documents": 2.0}, {}],
        "tokens": {"row of this rank": "int64", "trained": "bool"},
        "metrics": {"kl": 2.0},
        "partial": ["kl"],
    }
    tokens, repeated = notes.gather_tokens([notes.as_json()], Axis("dp"), torch.device("cpu"))
    assert {name: values.tolist() for name, values in tokens.items()} == {
        "rows": [0, 0, 1],
        "trained": [True, False, True],
    }
    assert repeated == 0
