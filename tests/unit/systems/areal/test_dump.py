"""Trajectories that AReaL 4aef98d8 wrote are read: text, rewards, groups. Made by tests/dumps/areal/write.py."""

import shutil
from pathlib import Path

import pytest

from workbench.check import check_step
from workbench.errors import RecordError
from workbench.systems.areal.dump import read_dump

DUMP = Path(__file__).parents[3] / "dumps/areal/rollout/6"


def test_tasks_are_groups():
    dump = read_dump(DUMP)
    assert dump.documents["rewards"].tolist() == [1.0, 0.0, 0.5, 0.0, 1.0]
    assert dump.documents["group_ids"].tolist() == [0, 0, 0, 1, 1]
    assert any("task 1" in note for note in dump.notes)
    assert not any("task" in note for note in read_dump(DUMP / "0.jsonl").notes)


def test_text_alone_decides_nothing():
    result = check_step(DUMP, system="areal", settings={})
    assert result.verdict == "vacuous"
    assert "text and no tokens" in "\n".join(result.undecided)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"task_id": 0, "sample_idx": 0}\n', "reward None"),
        ('{"task_id": 0, "sample_idx": 0, "reward": 1}\n' * 2, "sample 0 of task 0 twice"),
        ("", "no record"),
        ('{"task_id"', "line 1"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, content, message):
    (tmp_path / "0.jsonl").write_text(content)
    with pytest.raises(RecordError, match=message):
        read_dump(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(RecordError, match=r"no \*.jsonl"):
        read_dump(tmp_path)
    shutil.copy(DUMP / "0.jsonl", tmp_path)
    assert read_dump(tmp_path).num_documents == 3
