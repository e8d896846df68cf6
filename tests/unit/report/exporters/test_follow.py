"""Runs reach a tracker while they continue; what a tracker does wrong is said, and harms nothing."""

from __future__ import annotations

import contextlib
import sqlite3
import time

import pytest

from tests.helpers.hand_made import make_run, step_record
from workbench.atomic import from_json, to_json, write_whole
from workbench.errors import LaunchError, SpecError
from workbench.report.exporters import export
from workbench.report.exporters.follow import Tracking, is_online

PATIENCE_S = 90.0


def tensorboard_steps(folder):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    [file] = folder.rglob("*tfevents*")
    return [event.step for event in LegacyEventFileLoader(str(file)).Load() if _has_loss(event)]


def _has_loss(event):
    return any(value.tag == "loss/total/sum" for value in event.summary.value)


def wandb_steps(folder):
    from tests.unit.report.exporters.test_wandb_like import messages

    [file] = (folder / "wandb").glob("offline-run-*/*.wandb")
    rows = [record.history for record in messages(file) if record.HasField("history")]
    return [row.step.num for row in rows]


def trackio_steps(folder):
    [file] = [path for path in folder.glob("*.db") if "workbench" in path.name]
    with contextlib.closing(sqlite3.connect(file)) as database:  # its own context manager does not close it
        return [step for (step,) in database.execute("select step from metrics order by step")]


def mlflow_steps(folder):
    [file] = folder.rglob("metrics/loss/total/sum")
    return [int(line.split()[2]) for line in file.read_text().splitlines()]


def until(condition):
    """Poll: how long a tracker takes to start differs from machine to machine."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except (ValueError, OSError, sqlite3.OperationalError):  # its files are not there yet, or not their tables
            pass
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)


def end_run(run, state="succeeded"):
    path = run.path / "state.json"
    own = from_json(path.read_bytes())
    write_whole(path, to_json(own | {"state": state, "ended_ns": own["created_ns"] + 10**9}))


@pytest.mark.parametrize("to", ["tensorboard", "mlflow", "trackio", "wandb"])
def test_steps_arrive_while_the_run_continues(to, tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip(to)
    steps = {"tensorboard": tensorboard_steps, "mlflow": mlflow_steps, "trackio": trackio_steps}.get(to)
    run = make_run(tmp_path / "parity", "cp2", state="running", done=1)
    folder = tmp_path / "out"
    tracking = Tracking(to, folder=folder)
    tracking([run])
    try:
        if steps:
            until(lambda: steps(folder) == [0])
        run.append_step(step_record(1))
        if steps:  # W&B's file is written in blocks
            until(lambda: steps(folder) == [0, 1])
        for number in (2, 3):
            run.append_step(step_record(number))
        end_run(run)
    finally:
        assert tracking.close() == "", (folder / "follow.log").read_text()
    assert (steps or wandb_steps)(folder) == [0, 1, 2, 3]


def test_a_tracker_that_fails_is_said_and_raises_nothing(tmp_path, capfd):
    run = make_run(tmp_path / "parity", "a", state="running", done=1)
    before = sorted(path.name for path in run.path.iterdir())
    blocked = tmp_path / "out"
    (blocked / "workbench").parent.mkdir()
    (blocked / "workbench").write_text("a file where the tracker needs a folder")
    tracking = Tracking("tensorboard", folder=blocked)
    tracking([run])
    assert "workbench" in tracking.close()
    assert "The runs continue" in capfd.readouterr().err
    assert sorted(path.name for path in run.path.iterdir()) == before


def test_a_folder_that_cannot_be_made_starts_nothing(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    run = make_run(tmp_path / "parity", "a", state="running", done=0)
    tracking = Tracking("tensorboard", folder=tmp_path / "file" / "out")
    tracking([run])
    assert tracking.follower is None
    assert "The runs continue" in capfd.readouterr().err


def test_a_missing_package_and_an_unknown_tracker_are_refused_before_anything_starts(monkeypatch):
    with pytest.raises(SpecError, match="one of wandb"):
        Tracking("neptune")
    monkeypatch.setattr(export, "find_spec", lambda package: None)
    with pytest.raises(LaunchError, match="is not installed"):
        Tracking("wandb")


def test_nothing_to_follow_starts_no_process():
    for tracking in (Tracking("tensorboard"), Tracking(None)):
        tracking([])
        assert tracking.follower is None
        assert tracking.close() == ""


def test_only_the_tracker_s_own_environment_makes_it_online(monkeypatch):
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    assert not any(map(is_online, ("wandb", "mlflow", "trackio", "tensorboard")))
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not is_online("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:///somewhere")
    assert [to for to in ("wandb", "mlflow", "trackio", "tensorboard") if is_online(to)] == ["wandb", "mlflow"]
