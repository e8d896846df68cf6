"""Labels become numbers, text becomes a step of which only advantages are known, and lines are named in errors."""

import pyarrow
import pytest
import torch
from pyarrow import parquet

from workbench.dumps.readers import numbered, read_json_lines, read_table, rectangle, text_only, total_of
from workbench.errors import RecordError


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
