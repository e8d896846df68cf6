"""The folder of a record: written data come back; damaged, missing and incompatible data are named."""

import math
from pathlib import Path

import pytest
import torch

from workbench.atomic import to_json
from workbench.errors import RecordError
from workbench.records import trainer_files as files


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "deep" / "mine"
    files.write_record(folder, {"dp": 2, "order": "zigzag"})
    files.write_tensors(folder, 0, "gradients", {"w": torch.tensor([3.0, 4.0])})
    files.append_step(folder, {"step": 0, "loss": math.nan, "gradient_norms": {"w": 5.0}})
    files.append_step(folder, {"step": 1})
    return folder


def test_a_record_round_trips(folder):
    assert files.is_record(folder)
    assert not files.is_record(folder.parent)
    assert files.read_context(folder) == {"dp": 2, "order": "zigzag"}
    first, second = files.read_steps(folder)
    assert math.isnan(first["loss"])
    assert first["gradient_norms"] == {"w": 5.0}
    assert second == {"step": 1}
    assert files.read_tensors(folder, 0, "gradients")["w"].tolist() == [3.0, 4.0]
    assert files.read_tensors(folder, 0, "tokens") is None
    assert files.read_tensors(folder, 1, "gradients") is None


def test_a_record_without_steps_has_none(tmp_path):
    files.write_record(tmp_path, {})
    assert files.read_steps(tmp_path) == []


def test_a_record_is_never_replaced(folder):
    with pytest.raises(RecordError, match="never replaced"):
        files.write_record(folder, {})
    assert files.read_context(folder)["dp"] == 2


def test_a_context_that_is_no_json_begins_nothing(tmp_path):
    with pytest.raises(RecordError, match="as JSON"):
        files.write_record(tmp_path / "mine", {"mesh": torch.ones(2)})
    assert not (tmp_path / "mine").exists()


def test_a_step_needs_a_record(tmp_path):
    with pytest.raises(RecordError, match=r"no record\.json"):
        files.append_step(tmp_path, {"step": 0})
    assert list(tmp_path.iterdir()) == []


def test_a_torn_step_is_left_out_and_written_over(folder):
    with (folder / "steps.jsonl").open("ab") as file:
        file.write(b'{"crc32": "12345678", "step": 2, "lo')
    assert [step["step"] for step in files.read_steps(folder)] == [0, 1]
    files.append_step(folder, {"step": 2})
    assert [step["step"] for step in files.read_steps(folder)] == [0, 1, 2]


def test_damaged_lines_and_tensors_are_named(folder):
    lines = folder / "steps.jsonl"
    lines.write_bytes(lines.read_bytes().replace(b"5.0", b"5.1"))
    with pytest.raises(RecordError, match=r"mine/steps\.jsonl\n  found: line 1 of 2"):
        files.read_steps(folder)
    tensors = folder / "tensors" / "step0000.gradients.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-2])
    with pytest.raises(RecordError, match=r"mine/tensors/step0000\.gradients\.safetensors"):
        files.read_tensors(folder, 0, "gradients")


@pytest.mark.parametrize(
    "content", [b"{", to_json({"record": 2, "context": {}}), to_json([1]), to_json({"record": 1, "context": 3})]
)
def test_a_context_that_is_damaged_or_of_another_version_is_refused(folder, content):
    (folder / "record.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"record\.json"):
        files.read_context(folder)


def test_a_missing_record_is_refused(tmp_path):
    with pytest.raises(RecordError, match="a folder that a recorder wrote"):
        files.read_context(tmp_path)


def test_the_guide_has_all_per_token_values_and_their_meaning():
    guide = (Path(__file__).parents[3] / "docs/guides/diagnose.md").read_text()
    for name, meaning in files.TOKENS.items():
        assert f"| `{name}` | {meaning} |" in guide
