"""The agent leaves with the process that started it, and takes its children along."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from workbench.runs.store import project_root

# The agent of the test has a child, as torch.distributed.run has, and does `on_sigterm` when told to stop.
AGENT = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from workbench.launch.agent import leave_with
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
def stop(number, frame):
    child.kill(); child.wait(); print("told to stop", flush=True); os._exit(7)
signal.signal(signal.SIGTERM, {on_sigterm})
leave_with(os.getppid(), poll_s=0.05, grace_s=0.3)
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(60)
"""


@pytest.mark.parametrize("on_sigterm", ["stop", "signal.SIG_IGN"], ids=["orderly", "stubborn"])
def test_it_leaves_when_its_parent_was_killed(on_sigterm):
    agent = AGENT.format(root=str(project_root()), on_sigterm=on_sigterm)
    with subprocess.Popen([sys.executable, "-c", PARENT, agent], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        family = [psutil.Process(pid) for pid in pids]
        assert len(family) == 2
        time.sleep(0.2)
        assert all(process.is_running() for process in family)  # it stays while its parent does
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        _, alive = psutil.wait_procs(family, timeout=10)
        said = "" if alive else parent.stdout.read()
    try:
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
        assert ("told to stop" in said) == (on_sigterm == "stop")
    finally:
        for process in alive:
            process.kill()
