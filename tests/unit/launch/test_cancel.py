"""Ending a run from another process than the one that launched it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import psutil
import pytest

from workbench.launch import cancel as module
from workbench.launch.cancel import cancel_run
from workbench.records.directory import RunDirectory
from workbench.records.provenance import process_alive, this_process
from workbench.specs.run import RunSpec


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "cp2", RunSpec())


def described(process):
    return this_process() | {"pid": process.pid, "create_time": psutil.Process(process.pid).create_time()}


GONE = {"pid": 2**22 + 1, "create_time": 0.0}


def test_an_ended_run_keeps_its_state(run):
    run.set_state("failed")
    assert cancel_run(run) == "failed"
    assert not run.cancel_requested


def test_a_live_launcher_is_requested_and_awaited(run):
    run.note(launcher=this_process())

    def launcher():
        while not run.cancel_requested:
            time.sleep(0.01)
        run.set_state("cancelled")

    thread = threading.Thread(target=launcher)
    thread.start()
    assert cancel_run(run, wait_s=10) == "cancelled"
    thread.join()


def test_a_launcher_that_does_nothing_is_not_waited_for_for_ever(run):
    run.note(launcher=this_process())
    assert cancel_run(run, wait_s=0.3) == "pending"
    assert run.cancel_requested


def test_a_run_submitted_from_another_machine_is_cancelled_at_the_cluster(run, monkeypatch):
    asked = []

    class Job:
        def cancel(self):
            asked.append("cancel")

    monkeypatch.setattr(module.jobs, "job_of", lambda handle: asked.append(handle) or Job())
    run.note(launcher=this_process() | {"host": "elsewhere"}, backend="slurm", handle="slurm://torchx/7")
    assert cancel_run(run, wait_s=5) == "cancelled"
    assert asked == ["slurm://torchx/7", "cancel"]


def test_without_a_launcher_the_processes_are_stopped_from_here_with_their_children(run):
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True) as agent:
        child = psutil.Process(int(agent.stdout.readline()))
        family = [(agent.pid, described(agent)["create_time"]), (child.pid, child.create_time())]
        run.note(launcher=this_process() | GONE, agent=described(agent))
        run.set_state("running")
        run.note(rank0=this_process() | {"pid": child.pid, "create_time": child.create_time()})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_GRACE_S", 1.0)
            assert cancel_run(run) == "cancelled"
        assert not any(process_alive(*process) for process in family)


def test_a_process_of_another_machine_is_never_signalled(run):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        run.note(launcher=this_process() | GONE, agent=described(stranger) | {"host": "elsewhere"})
        run.set_state("running")
        run.note(rank0=this_process() | GONE)
        cancel_run(run)
        assert stranger.poll() is None
        stranger.kill()


def test_a_process_that_inherited_the_pid_is_never_signalled(run):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        run.note(launcher=this_process() | GONE, agent=described(stranger) | {"create_time": 0.0})
        cancel_run(run)
        assert stranger.poll() is None
        stranger.kill()


def test_the_scheduler_is_queried_on_a_cluster(run, monkeypatch):
    asked = []

    class Job:
        def __init__(self, handle):
            self.handle = handle

        def cancel(self):
            asked.append(self.handle)

    monkeypatch.setattr(module.jobs, "job_of", Job)
    run.note(launcher=this_process() | GONE, backend="slurm", handle="slurm://x/7")
    assert cancel_run(run) == "cancelled"
    assert asked == ["slurm://x/7"]
