"""One run of a sweep: its new steps are read once, and its events say how far it is."""

from __future__ import annotations

import pytest

from workbench.launch.ablation import PlannedRun
from workbench.launch.devices import Placement
from workbench.launch.task import Task
from workbench.records.directory import RunDirectory
from workbench.specs.run import RunSpec


@pytest.fixture
def task(tmp_path):
    spec = RunSpec(layout={"cp": 2}, steps=3)
    run = RunDirectory.create(tmp_path / "runs", "cp2", spec)
    return Task(PlannedRun("cp2", spec, "", "", "cp2"), run, Placement("cpu", note="no GPU here"))


def test_new_steps_are_read_once_and_damage_adds_none(task):
    assert task.read_steps()  # the first look is reported, also without a step
    assert not task.read_steps()
    task.run.append_step({"step": 0})
    assert task.read_steps()
    assert not task.read_steps()
    assert task.steps_done == 1
    with (task.run.path / "metrics.jsonl").open("ab") as file:
        file.write(b"no record\n\n")
    assert not task.read_steps()
    assert task.steps_done == 1


def test_an_event_is_a_line_with_place_progress_and_cause(task):
    task.read_steps()
    assert str(task.event(0, 12, "running", "")) == (
        "[ ./12] cp2                          2 ranks cpu  0/3 steps  running 0.0 s (no GPU here)"
    )
    event = task.event(7, 12, "failed", "rank 1 ValueError: no")
    assert (event.number, event.seconds_left) == (7, None)
    assert str(event).startswith("[ 7/12] cp2 ")
    assert str(event).endswith("failed 0.0 s: rank 1 ValueError: no (no GPU here)")


def test_devices_are_released_once(task, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert task.take_devices(())
    other = Task(task.plan, task.run, task.placement)
    task.note_user()  # no agent is known yet
    assert not task.user_recorded
    task.release()
    task.release()
    assert task.lease is None
    assert other.take_devices(())
    other.release()
