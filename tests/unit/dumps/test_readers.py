"""Labels become numbers, text becomes a step of which only advantages are known, and lines are named in errors."""

from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet

from workbench.dumps.readers import (
    completion,
    groups_of_prompts,
    numbered,
    numbers_of,
    packed,
    read_json_lines,
    read_table,
    rectangle,
    text_only,
    total_of,
)
from workbench.errors import RecordError

PATH = Path("a.pt")


def test_labels_are_numbered_as_they_appear():
    assert numbered(["b", "a", "b", 3, {"x": 1}, {"x": 1}]).tolist() == [0, 1, 0, 2, 3, 3]


def test_rectangles_are_cast():
    dump = rectangle({"loss_mask": torch.ones(1, 2, dtype=torch.int64)}, {"rewards": torch.ones(1).bfloat16()})
    assert dump.loss_mask_T.tolist() == [True, True]
    assert dump.documents["rewards"].dtype is torch.float64


def test_text_is_one_token_a_document():
    dump = text_only([1.0, 0.0], torch.tensor([0, 0]), advantages=[0.5, -0.5], origin="a file")
    assert dump.num_documents == 2
    assert dump.advantages_T.tolist() == [0.5, -0.5]
    assert "no tokens" in dump.notes[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no record"), ('{"a": 1}\n{', "line 2"), ("[1]", "line 1: a list"), ("\udce4", "UnicodeDecodeError")],
)
def test_each_line_that_is_no_object_is_named(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("utf8", "surrogateescape"))
    with pytest.raises(RecordError, match=message):
        read_json_lines(path)


def test_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]
    with pytest.raises(RecordError, match="No such file"):
        read_json_lines(tmp_path / "b.jsonl")


def test_rewards_that_were_not_scored_add_nothing():
    assert total_of([[1.0, None], [float("nan"), 2]]) == [1.0, 2.0]


def test_a_table_without_rows_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": [1, 2]}), path)
    assert read_table(path) == {"a": [1, 2]}
    parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), path)
    with pytest.raises(RecordError, match="no row"):
        read_table(path)


def test_documents_of_unequal_length_are_packed():
    rows = [{"loss_mask": torch.ones(n), "old_logprobs": -torch.ones(n)} for n in (2, 1)]
    dump = packed(PATH, rows, {"rewards": torch.ones(2)})
    assert dump.document_ids_T.tolist() == [0, 0, 1]
    assert dump.loss_mask_T.dtype is torch.bool
    with pytest.raises(RecordError, match="no document"):
        packed(PATH, [], {})
    with pytest.raises(RecordError, match="old_logprobs in document 0 or document 1"):
        packed(PATH, [rows[0], {"loss_mask": torch.ones(1)}], {})
    with pytest.raises(RecordError, match="document 0 with 2 loss_mask, 1 old_logprobs"):
        packed(PATH, [{**rows[0], "old_logprobs": -torch.ones(1)}], {})


def test_numbers_of_a_record_are_tensors():
    record = {"a": [1.0, None], "b": torch.ones(2), "c": ["x"], "d": [[1], [2]], "e": [[1], [2, 3]]}
    assert numbers_of(PATH, "line 1", record, "a").isnan().tolist() == [False, True]
    assert numbers_of(PATH, "line 1", record, "b").tolist() == [1.0, 1.0]
    assert numbers_of(PATH, "line 1", record, "d", dim=2).shape == (2, 1)
    for name, message in (
        ("c", "not numbers"),
        ("d", r"shape \[2, 1\]"),
        ("e", "not numbers"),
        ("f", "line 1 with a, b"),
    ):
        with pytest.raises(RecordError, match=message):
            numbers_of(PATH, "line 1", record, name)


def test_a_completion_begins_with_its_first_trained_token():
    row = {"loss_mask": torch.tensor([0, 0, 1, 0, 1]), "token_ids": torch.arange(5)}
    own = completion(PATH, "line 1", row)
    assert own["token_ids"].tolist() == [2, 3, 4]
    assert own["token_mask"].tolist() == [True, True, True]
    assert len(completion(PATH, "line 1", {"loss_mask": torch.zeros(3)})["loss_mask"]) == 3
    with pytest.raises(RecordError, match="line 1 with 5 loss_mask, 2 token_ids"):
        completion(PATH, "line 1", {**row, "token_ids": torch.arange(2)})


def test_equal_prompts_are_one_group():
    assert groups_of_prompts([torch.tensor([1, 2]), torch.tensor([1]), torch.tensor([1, 2])]).tolist() == [0, 1, 0]
