"""The fork server as a program: its preloads, its environment, and its exit."""

from __future__ import annotations

import ast
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.interruptible import INTERRUPTIBLE
from workbench.errors import LaunchError
from workbench.launch import forkserver, processes
from workbench.launch.devices import Placement
from workbench.launch.processes import PRELOAD, _short_folder
from workbench.records.directory import RunDirectory
from workbench.records.provenance import process_alive
from workbench.specs.run import RunSpec

PROGRAM = Path(forkserver.__file__)


@pytest.fixture
def folder():
    """For sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(dir=_short_folder()) as path:
        yield path


@pytest.fixture
def server(folder):
    """Starts the program with some modules to load; gives the process and the other end of its standard input."""
    started = []

    def start(*preload):
        here, there = socket.socketpair()
        with there, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/{len(started)}")
            listener.listen()
            process = subprocess.Popen(
                [*INTERRUPTIBLE, sys.executable, "-P", str(PROGRAM), str(listener.fileno()), *preload],
                stdin=there,
                pass_fds=[listener.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        here.settimeout(120)
        started.append((process, here))
        return process, here

    yield start
    for process, here in started:
        here.close()
        process.kill()
        process.communicate()


def test_is_ready_after_loading_and_exits_when_unused(server):
    process, here = server("json", "wave")
    assert here.recv(1) == forkserver.READY
    assert process.poll() is None
    here.close()
    assert process.wait(60) == 0


def test_calls_fill_caches_before_it_is_ready(server):
    process, here = server("re", "os:_exit=7")  # no error is hidden: the argument is text
    assert here.recv(1) == b""
    assert process.wait(60) != 0
    assert b"'str' object cannot be interpreted as an integer" in process.stderr.read()
    _, here = server("textwrap:dedent=x")
    assert here.recv(1) == forkserver.READY


def test_runs_nothing_but_its_forks(server):
    """A thread that does not survive a fork could hold a lock for ever: numpy's is one."""
    process, here = server("json")
    assert here.recv(1) == forkserver.READY
    assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1


def test_an_import_error_is_reported(server):
    process, here = server("no_such_library")
    assert here.recv(1) == b""
    assert process.wait(60) != 0
    assert b"No module named 'no_such_library'" in process.stderr.read()


def test_ctrl_c_is_not_for_it(server):
    process, here = server("json")
    assert here.recv(1) == forkserver.READY
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None


def test_a_fork_imports_from_the_given_path_and_leaves_no_zombie(server, tmp_path, folder):
    (tmp_path / "workbench" / "launch").mkdir(parents=True)
    for package in ("workbench", "workbench/launch"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "workbench" / "launch" / "forks.py").write_text(
        "import os, sys\n"
        "def serve(peer):\n"
        "    peer.sendall(f'{os.getpid()} {sys.path[0]} {peer.recv(99).decode()}'.encode())\n"
    )
    process, control = server("json")
    assert control.recv(1) == forkserver.READY
    with socket.socket(socket.AF_UNIX) as here:
        here.connect(f"{folder}/0")
        here.settimeout(120)
        here.sendall(f"{tmp_path}\nhello".encode())
        pid, path, text = here.recv(999).decode().split()
        assert (path, text) == (str(tmp_path), "hello")
        assert int(pid) != process.pid
        assert here.recv(1) == b""  # no other process has the fork's end
    until = time.monotonic() + 60
    while psutil.Process(process.pid).children():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_exits_with_its_parent_even_if_its_input_stays_open(folder):
    """A child that the parent forked keeps a copy of every file that the parent had open."""
    script = f"""
import os, socket, subprocess, sys, time
here, there = socket.socketpair()
listener = socket.socket(socket.AF_UNIX)
listener.bind("{folder}/0")
listener.listen()
server = subprocess.Popen(
    [sys.executable, "-P", {str(PROGRAM)!r}, str(listener.fileno()), "json"],
    stdin=there, pass_fds=[listener.fileno()], start_new_session=True,
)
here.recv(1)
child = os.fork()
if child == 0:
    time.sleep(60)
print(server.pid, child, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        server, child = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
        born = server.create_time()
        assert process_alive(server.pid, born)
        parent.kill()
    try:
        until = time.monotonic() + 60
        while process_alive(server.pid, born):
            assert time.monotonic() < until
            time.sleep(0.05)
        assert child.is_running()
        assert not Path(folder, "0").exists(), "nobody else removes the socket of a parent that was killed"
    finally:
        child.kill()


def test_neither_the_server_nor_its_preloads_import_the_workbench():
    """Copies would not see edits of it."""
    imported = [
        alias.name
        for node in ast.walk(ast.parse(PROGRAM.read_text()))
        for alias in getattr(node, "names", [])
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert imported
    assert not [name for name in [*imported, *PRELOAD] if name.startswith("workbench")]


def test_a_server_that_is_gone_is_an_error_of_the_launch(tmp_path, monkeypatch):
    """Killed between its start and its answer: the runs fail, and the launcher goes on."""
    monkeypatch.setattr(processes, "warm_up", lambda: None)
    monkeypatch.setattr(processes, "address", lambda: str(tmp_path / "forks"))
    run = RunDirectory.create(tmp_path, "a", RunSpec())
    with pytest.raises(LaunchError, match="no fork server at"):
        processes.start([run], 1, Placement("cpu"), project=tmp_path)
