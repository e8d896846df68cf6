"""Runs are exported to a tracker once, completely, offline; omissions are reported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.hand_made import make_run
from tests.helpers.stand_in import stand_in
from workbench.atomic import to_json
from workbench.errors import LaunchError, SpecError
from workbench.report.exporters import TRACKERS, export
from workbench.report.exporters.export import default_folder, export_runs


@pytest.mark.parametrize("to", TRACKERS)
class TestEveryTracker:
    def test_exports_every_run_only_once(self, to, exported, runs):
        _, first, again, *_ = exported(to)
        assert [(run.id, run.outcome, run.steps) for run in first] == [
            (runs[0].path.name, "exported", 3),
            (runs[1].path.name, "exported", 1),
            (runs[2].path.name, "exported", 0),
        ]
        assert [(run.id, run.outcome, run.steps, run.notes) for run in again] == [
            (run.path.name, "there already", 0, ()) for run in runs
        ]

    def test_reports_omissions(self, to, exported):
        assert "text is not a number: left out" in exported(to)[1][0].notes

    def test_uses_no_network(self, to, exported):
        assert exported(to)[3] == ""

    def test_leaves_no_process(self, to, exported):
        """W&B writes through a service."""
        assert exported(to)[4] == []

    def test_leaves_nothing_unfinished(self, to, exported):
        assert not list(exported(to)[0].rglob(".unfinished-*"))

    def test_names_no_host_and_no_user(self, to, exported):
        names = {os.uname().nodename.encode(), str(exported(to)[0].parent).encode()} - {b"localhost"}
        names = {name for name in names if len(name) > 3}  # two letters stand in any binary file by chance
        for path in exported(to)[0].rglob("*"):
            if path.is_file() and path.suffix != ".log" and path.name != "meta.yaml":  # W&B's and MLflow's own places
                assert not [name for name in names if name in path.read_bytes()], path

    def test_a_missing_package_names_the_extra(self, to, monkeypatch, runs):
        monkeypatch.setattr(export, "find_spec", lambda package: None)
        with pytest.raises(LaunchError, match=rf"is not installed[\s\S]*pip install 'workbench\[{to}\]'"):
            export_runs(runs, to=to)

    def test_a_folder_of_its_name_is_not_the_package(self, to, monkeypatch, runs, tmp_path):
        """W&B leaves a folder `wandb` behind, which Python would take for an empty package."""
        (tmp_path / "somewhere").mkdir()
        result = importlib.util.spec_from_loader("wandb", None, is_package=True)
        assert result.origin is None
        monkeypatch.setattr(export, "find_spec", lambda package: result)
        with pytest.raises(LaunchError, match="is not installed"):
            export_runs(runs, to=to)


def test_only_ended_runs_are_exported(tmp_path):
    running = make_run(tmp_path / "parity", "a", state="running", done=2)
    [outcome] = export_runs([running], to="tensorboard", folder=tmp_path / "out")
    assert (outcome.outcome, outcome.why) == ("left out", "it is running")
    assert not (tmp_path / "out").exists()


def test_a_damaged_run_does_not_keep_the_others(tmp_path):
    runs = [make_run(tmp_path / "parity", name) for name in "ab"]
    metrics = runs[0].path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b'"step": 1', b'"step": 9'))
    outcomes = export_runs(runs, to="tensorboard", folder=tmp_path / "out")
    assert [(each.outcome, each.why) for each in outcomes] == [("left out", "line 2 of 4 is damaged"), ("exported", "")]


def test_writes_next_to_the_runs_by_default(tmp_path):
    run = make_run(tmp_path / "parity", "a")
    export_runs([run], to="tensorboard")
    assert default_folder(run, "tensorboard") == tmp_path / "parity" / "runs" / "exports" / "tensorboard"
    assert list(default_folder(run, "tensorboard").rglob("*tfevents*"))


def test_nothing_to_do(tmp_path):
    assert export_runs([], to="tensorboard", folder=tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_a_tracker_that_is_not_there_is_refused(runs):
    with pytest.raises(SpecError, match="one of wandb, trackio, mlflow, tensorboard"):
        export_runs(runs, to="aim")


@pytest.mark.parametrize("project", ["", "../up", "a/b", "two words"])
def test_a_project_that_is_no_name_everywhere_is_refused(runs, project):
    with pytest.raises(SpecError, match="beginning with a letter or digit"):
        export_runs(runs, to="tensorboard", project=project)


class TestTheProcess:
    @pytest.fixture
    def child(self, monkeypatch):
        """In place of the tracker's process, a little program of ours."""

        def replace(program):
            def start(command, **named):
                assert command[:4] == [sys.executable, "-P", "-m", "workbench.report.exporters"]
                return subprocess.Popen([sys.executable, "-c", program, command[-1]], **named)

            monkeypatch.setattr(export, "subprocess", stand_in(subprocess, Popen=start))

        return replace

    def test_a_failure_reports_its_last_output_and_the_number_exported(self, child, tmp_path):
        child("import sys; open(sys.argv[1], 'w').write('{}\\n'); print('much'); sys.exit('the disk is full')")
        with pytest.raises(LaunchError, match=r"found: the disk is full[\s\S]*1 runs are there") as caught:
            export_runs([make_run(tmp_path, "a")], to="tensorboard", folder=tmp_path / "out")
        assert caught.value.__notes__ == ["much\nthe disk is full"]

    def test_that_does_not_end_is_ended_with_all_that_it_started(self, child, tmp_path, monkeypatch):
        monkeypatch.setattr(export, "_PATIENCE_S", 1.0)
        monkeypatch.setattr(export, "_PATIENCE_PER_RUN_S", 0.0)
        pids = tmp_path / "pids"
        child(
            "import os, subprocess, sys, time\n"
            "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            f"os.makedirs({str(tmp_path / 'out')!r} + f'/.unfinished-{{os.getpid()}}-x')\n"
            f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{other.pid}}')\n"
            "time.sleep(60)"
        )
        deadline = time.monotonic() + 120
        with pytest.raises(LaunchError, match="no end after 1 s"):
            export_runs([make_run(tmp_path, "a")], to="tensorboard", folder=tmp_path / "out")
        assert time.monotonic() < deadline  # the other keeps the output open, and would be waited for
        while any(map(_is_there, map(int, pids.read_text().split()))) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_is_there, map(int, pids.read_text().split())))
        assert not list((tmp_path / "out").iterdir())

    def test_hears_none_of_the_users_settings_for_trackers(self, child, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_API_KEY", "secret")
        answer = to_json({"outcome": "exported", "steps": 0, "notes": []}, indent=None).decode()
        child(
            "import os, sys\n"
            "assert 'WANDB_API_KEY' not in os.environ and os.environ['WANDB_MODE'] == 'offline'\n"
            f"open(sys.argv[1], 'w').write({answer!r})"
        )
        [outcome] = export_runs([make_run(tmp_path, "a")], to="wandb", folder=tmp_path / "out")
        assert outcome.outcome == "exported"


def _is_there(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
