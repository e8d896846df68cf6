"""Files are whole or absent; lines detect that they were changed."""

import errno
import math

import pytest
import torch
from safetensors import SafetensorError

from workbench.atomic import (
    append_line,
    drop_torn_tail,
    from_json,
    read_lines,
    read_tensors,
    system_errors,
    to_json,
    write_tensors,
    write_whole,
)
from workbench.errors import RecordError


def test_values_outside_of_json_round_trip():
    read = from_json(to_json({"a": [math.nan, math.inf, -math.inf, 1.5], "b": {"c": None}}))
    assert math.isnan(read["a"][0])
    assert read["a"][1:] == [math.inf, -math.inf, 1.5]
    assert read["b"] == {"c": None}


def test_invalid_json_is_refused():
    with pytest.raises(RecordError, match="turn tensors into numbers"):
        to_json({"loss": torch.tensor(1.0)})


def test_a_file_that_cannot_be_replaced_stays(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="a"):
        write_whole(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_lines_come_back_in_order_and_a_torn_one_makes_room(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert read_lines(path, fix="") == []
    for number in range(2):
        append_line(path, {"step": number})
    path.write_bytes(path.read_bytes() + b'{"crc32": "0000')
    assert read_lines(path, fix="") == [{"step": 0}, {"step": 1}]
    drop_torn_tail(path)
    append_line(path, {"step": 2})
    assert read_lines(path, fix="") == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_line_that_was_changed_is_named(tmp_path):
    path = tmp_path / "lines.jsonl"
    for number in range(3):
        append_line(path, {"step": number})
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 7'))
    with pytest.raises(RecordError, match="line 2 of 3 is damaged"):
        read_lines(path, fix="do it again")


@pytest.mark.parametrize("record", [{}, {"crc32": 1}])
def test_a_line_without_content_or_with_the_name_of_the_check_is_refused(tmp_path, record):
    with pytest.raises(RecordError, match="none named crc32"):
        append_line(tmp_path / "lines.jsonl", record)


def test_tensors_that_share_memory_come_back_each_by_itself(tmp_path):
    whole = torch.arange(6.0)
    path = write_tensors(tmp_path / "tensors" / "a.safetensors", {"whole": whole, "part": whole[2:4]})
    read = read_tensors(path, requested="", fix="")
    assert read["part"].tolist() == [2.0, 3.0]
    assert read["whole"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_damaged_tensors_are_refused_by_name(tmp_path):
    path = write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3)})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RecordError, match="read mine/a"):
        read_tensors(path, requested="read mine/a", fix="again")


def test_an_error_of_the_system_in_the_tensor_library_is_one_of_the_system(tmp_path):
    with pytest.raises(OSError, match="No space left") as error, system_errors(tmp_path / "step0.safetensors"):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert error.value.errno == errno.ENOSPC
    assert error.value.filename == str(tmp_path / "step0.safetensors")


def test_another_error_of_the_tensor_library_stays(tmp_path):
    with pytest.raises(SafetensorError), system_errors(tmp_path):
        raise SafetensorError("Error while serializing: invalid header")
