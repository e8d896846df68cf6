"""One run of a sweep: its new steps are read once, and its events say how far it is."""

from __future__ import annotations

import pytest

from workbench.errors import LaunchError
from workbench.launch.ablation import PlannedRun
from workbench.launch.devices import Placement
from workbench.launch.task import SharedJob, Task, share
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
    job, other = SharedJob([task]), SharedJob([task])
    assert job.take_devices(())
    job.note_user()  # no agent is known yet
    assert not job.user_recorded
    job.release()
    job.release()
    assert job.lease is None
    assert other.take_devices(())
    other.release()


@pytest.mark.parametrize(
    ("runs", "slots", "per_job", "expected"),
    [
        ([((1, "cpu"), 4)] * 13, {"cpu": 2}, None, {(1, "cpu"): 7}),  # two jobs at a time
        ([((1, "cpu"), 4)] * 4, {"cpu": 8}, None, {(1, "cpu"): 2}),  # a start costs as much as 5 steps
        ([((2, "cpu"), 30)] * 5 + [((1, "cpu"), 30)], {"cpu": 2}, None, {(2, "cpu"): 5, (1, "cpu"): 1}),
        ([((4, "cpu"), 4)] * 60, {"cpu": 2}, None, {(4, "cpu"): 50}),  # 200 steps
        ([((1, "cpu"), 1), ((1, "cpu"), 1000)], {"cpu": 1}, None, {(1, "cpu"): 1}),  # a long one shares with none
        ([((2, "cuda"), 4)] * 12, {"cuda": 4}, None, {(2, "cuda"): 6}),
        ([((2, "cuda"), 4)] * 8, {}, None, {(2, "cuda"): 8}),  # a cluster, where every job waits in a queue
        ([((2, "cuda"), 500)] * 8, {}, 3, {(2, "cuda"): 3}),
    ],
)
def test_jobs_are_shared_by_runs_that_are_short_for_their_start(runs, slots, per_job, expected):
    assert share(runs, slots, per_job) == expected


def test_a_job_without_a_run_is_refused():
    with pytest.raises(LaunchError, match="0 runs for each job"):
        share([((1, "cpu"), 4)], {}, 0)
