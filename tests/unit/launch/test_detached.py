"""Detached launchers: they outlive the process that asked, answer with its errors, and are found while they live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import warm, warm_launcher
from workbench.atomic import to_json
from workbench.errors import LaunchError, SpecError
from workbench.experiment import Experiment
from workbench.launch import detached
from workbench.launch.ablation import AblationSpec
from workbench.launch.detached import expected_seconds, launchers, recorded, start
from workbench.records.directory import RunDirectory
from workbench.records.provenance import this_process
from workbench.records.states import ENDED

ROOT = Path(__file__).parents[3]
ENDLESS = {
    "base": {"precision": "float64", "steps": 50_000},
    "reference": "a",
    "configurations": {"a": {}, "b": {"seed": 1}},
}
ASKING = """
import os, sys, time, workbench
from tests.helpers.stand_in import stand_in
from workbench.launch import detached
detached.sys = stand_in(sys, executable=os.environ["WARM_PYTHON"])
experiment = workbench.Experiment(sys.argv[1]).launch(where="processes", detached=True)
print("launched", flush=True)
time.sleep(600)
"""


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return found


def _command(process):
    """The command line of a process; none of one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def endless(tmp_path, monkeypatch):
    """An experiment that a process has launched, detached, before it was killed with its whole group."""
    monkeypatch.setenv("WARM_PYTHON", warm.python())
    experiment = Experiment(ENDLESS, folder=tmp_path / "endless")
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKING, str(experiment.folder)], stdout=subprocess.PIPE, start_new_session=True
    )
    with asking:
        assert asking.stdout.readline() == b"launched\n"
        os.killpg(asking.pid, signal.SIGKILL)
    yield experiment
    experiment.cancel()
    until(lambda: not launchers(experiment.folder / "runs"))


def test_runs_outlive_who_asked_and_are_found_shown_and_cancelled(endless):
    runs_dir = endless.folder / "runs"
    [launcher] = launchers(runs_dir)
    process = psutil.Process(launcher.pid)
    assert process.cmdline()[-2] == warm_launcher.__file__
    until(lambda: any(warm.python() in _command(child) for child in process.children()))  # a fork server, started warm
    run = until(lambda: next((run for run in endless.runs if run.status == "running" and run.steps()), None))
    taken = len(run.steps())
    until(lambda: len(run.steps()) > taken)
    assert endless.states().keys() == {"a", "b"}
    assert [each.doing for each in launchers(runs_dir)] == ["watches"]
    with pytest.raises(SpecError, match=f"already running or waiting: .*process {launcher.pid}"):
        Experiment(endless.folder).launch(where="processes", detached=True)
    endless.cancel()
    assert set(endless.wait().values()) <= {"cancelled", "not launched"}
    until(lambda: not launchers(runs_dir))
    assert not list((runs_dir / detached.FOLDER).glob("*.json"))


def test_runs_end_with_their_launcher(endless):
    [launcher] = launchers(endless.folder / "runs")
    run = until(lambda: next((run for run in endless.runs if run.status == "running"), None))
    rank = psutil.Process(run.state["rank0"]["pid"])
    os.kill(launcher.pid, signal.SIGKILL)
    until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    until(lambda: set(endless.wait().values()) <= {"lost", "failed", "cancelled"})
    assert run.status in ENDED


def test_an_error_of_the_launch_is_raised_here(tmp_path):
    missing = ENDLESS | {"base": {"precision": "float64", "data": {"path": "no/such/rollouts"}}}
    with pytest.raises(SpecError, match="no/such/rollouts"):
        Experiment(missing, folder=tmp_path / "missing").launch(where="processes", detached=True)
    assert launchers(tmp_path / "missing" / "runs") == []


def test_a_launcher_that_does_not_answer_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(detached, "LAUNCHER", "no_such_launcher")
    with pytest.raises(LaunchError, match=r"exit code 1; its last lines: .*No module named no_such_launcher"):
        start({}, tmp_path / "runs")


def test_who_is_dead_is_no_launcher_and_its_record_goes_with_the_next(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / detached.FOLDER
    with recorded(tmp_path / "runs") as record:
        [mine] = launchers(tmp_path / "runs")
        assert (mine.pid, mine.doing, mine.log) == (os.getpid(), "launches", folder / f"{os.getpid()}.log")
        record.write("compares")
        assert launchers(tmp_path / "runs")[0].doing == "compares"
    assert launchers(tmp_path / "runs") == []
    dead = folder / "17.json"
    process = this_process() | {"pid": 17, "create_time": 1.0}
    dead.write_bytes(to_json({"process": process, "log": "17.log", "began_ns": 1, "doing": "watches"}))
    (folder / "18.json").write_text("half a rec")
    assert launchers(tmp_path / "runs") == []
    monkeypatch.setattr(detached, "LAUNCHER", "no_such_launcher")
    with pytest.raises(LaunchError):
        start({}, tmp_path / "runs")
    assert not dead.exists()


@pytest.mark.parametrize(("printed", "left"), [("", False), ("report: here\n", True)])
def test_a_log_with_nothing_in_it_is_not_kept(tmp_path, printed, left):
    log = tmp_path / detached.FOLDER / f"{os.getpid()}.log"
    with recorded(tmp_path):
        log.write_text(printed)
    assert log.exists() == left


def planned(steps, **more):
    return AblationSpec.model_validate(
        {
            "base": {"precision": "float64", "steps": steps, **more},
            "reference": "a",
            "configurations": {"a": {}, "b": {"seed": 1}},
        }
    ).expand()


def test_long_is_by_steps_of_the_model_or_by_earlier_runs(tmp_path):
    few, many = (expected_seconds(planned(steps), tmp_path, ROOT) for steps in (4, 20_000))
    assert few < 5 < detached.LONG_S < many
    assert expected_seconds(planned(4, model={"source": "Qwen/Qwen3-0.6B"}), tmp_path, ROOT) > 3 * few
    first = planned(4)[0]
    run = RunDirectory.create(tmp_path, first.name, first.spec)
    for step, milliseconds in enumerate((90_000.0, 2_000.0, 4_000.0)):
        run.append_step({"step": step, "time/step_ms": milliseconds})
    assert expected_seconds(planned(4)[:1], tmp_path, ROOT) == pytest.approx(4 * 3.0)


def test_only_a_long_launch_is_detached_unasked(tmp_path, monkeypatch, capsys):
    module = sys.modules[Experiment.__module__]
    asked, here = [], []
    launcher = detached.Launcher(7, Path("log"), 0, "watches")
    monkeypatch.setattr(module.detaching, "start", lambda request, runs: asked.append(request) or launcher)
    monkeypatch.setattr(module, "launch", lambda *_, **how: here.append(how))
    experiment = Experiment(ENDLESS, folder=tmp_path, changes={"seed": 3}, only=["a"])
    experiment.launch("processes")
    assert "process 7 continues these runs" in capsys.readouterr().err
    [request] = asked
    assert (request["changes"], request["only"]) == ({"seed": 3}, ["a"])
    assert (request["launching"]["where"], request["report"], experiment.sweep) == ("processes", False, None)
    for how in ({"where": "here"}, {"where": "slurm"}, {"detached": False}):
        experiment.launch(**how)
    assert (len(asked), len(here)) == (1, 3)
    experiment.launch(detached=True)
    assert (len(asked), capsys.readouterr().err) == (2, "")
    with pytest.raises(SpecError, match="'here' is this process"):
        experiment.launch("here", detached=True)
    with pytest.raises(SpecError, match="only a detached launcher writes the report"):
        experiment.launch("here", report=True)
