"""A rank shows its stack on request, leaves one when it is stopped, and dies with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.pretended_ranks import pretended_ranks
from workbench.records.provenance import project_root
from workbench.sharding.flight import read_all
from workbench.train.watched import last_stack_path, stack_path


def wait_until(true):
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_signal_prints_the_stack_repeatedly_and_the_run_continues(tmp_path):
    with pretended_ranks(tmp_path, "a (b") as (run, [rank]):
        assert read_all(run.path / "ranks")[0].inside.name == "b"
        stack, size = stack_path(run, 0), 0
        for _ in range(2):
            os.kill(rank.pid, signal.SIGUSR1)
            wait_until(lambda before=size: stack.stat().st_size > before)
            size = stack.stat().st_size
        wait_until(lambda: stack.read_text().count(" in stay\n") == 2)
        assert rank.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV])
def test_it_leaves_its_stack_when_it_is_stopped_or_crashes_and_dies_of_that_signal(tmp_path, number):
    with pretended_ranks(tmp_path, "a (b") as (run, [rank]):
        os.kill(rank.pid, number)
        assert rank.wait(timeout=120) == -number
        assert " in stay\n" in last_stack_path(run, 0).read_text()


PARENT = """
import os, subprocess, sys, time
env = os.environ | {"WB_AGENT_PID": str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
BUSY = """
import os, re, time
from workbench.train.watched import die_with
die_with(int(os.environ["WB_AGENT_PID"]))
print("ready", flush=True)
re.match("(a+)+$", "a" * 60 + "b")  # never lets another thread of Python run
"""
IDLE = BUSY.replace("re.match", "time.sleep(60) #")
WITHOUT_LINUX = "import ctypes; ctypes.CDLL = lambda name: {}.missing\n" + IDLE


@pytest.mark.parametrize("child", [BUSY, IDLE, WITHOUT_LINUX], ids=["busy", "idle", "another system"])
def test_it_dies_with_its_parent(child):
    with subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, cwd=project_root()) as parent:
        process = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)
        assert process.is_running()
        parent.kill()
    try:
        process.wait(timeout=120)
    except psutil.TimeoutExpired:
        process.kill()
        raise


def test_exits_at_once_if_its_parent_is_already_gone(tmp_path):
    script = IDLE.replace('int(os.environ["WB_AGENT_PID"])', "1 if os.getppid() != 1 else 2")
    done = subprocess.run([sys.executable, "-c", script], cwd=project_root(), timeout=240, stdout=subprocess.DEVNULL)
    assert done.returncode == 128 + signal.SIGTERM
