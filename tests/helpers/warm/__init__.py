"""Python programs that need not load libraries again: forks of one process that has loaded them for all workers.

A test starts a program through `client.py`, in place of the interpreter (`python`, `kernels`); so does such a program.
The first one starts the server, `server.py`, which loads the libraries below and none of the workbench, as
`workbench.launch.forkserver` does: a fork imports the workbench as it is on disk. Where a start from nothing is what a
test is about (which libraries a command imports, how long it takes), it starts `sys.executable` itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.programs import write_program
from workbench.launch.processes import PRELOAD

FOLDER = Path(__file__).parent
LIBRARIES = (
    *PRELOAD,
    "pandas",
    "ipykernel.ipkernel",
    "ipywidgets",
    "IPython.core.completer",
    "matplotlib.figure",
    "tabulate",  # torch._dynamo imports it at the end of every program
)
"""What kernels, launchers and ranks load. Without ipykernel.kernelapp, which reads the environment then
(JPY_PARENT_PID)."""


def python() -> str:
    """Path of the program that stands for the interpreter; the server is started if there is none."""
    return str(Path(_server()).with_name("python"))


class _Warm:
    """`sys`, but for its executable, with which the server starts at the first use."""

    @property
    def executable(self) -> str:
        return python()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def start_from(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let modules that start ``sys.executable`` start warm programs."""
    for module in modules:
        monkeypatch.setattr(module, "sys", _Warm())


def kernels(jupyter: Path) -> None:
    """Make the kernel python3 of a folder of JUPYTER_PATH, which comes before that of the environment, a warm one."""
    folder = jupyter / "kernels/python3"
    folder.mkdir(parents=True)
    argv = [python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3 (ipykernel)", "language": "python", "metadata": {"debugger": True}}
    (folder / "kernel.json").write_text(json.dumps(spec))


def _server() -> str:
    """Path of the socket of the server, which all workers of a session share, and which ends with the session.

    Connections wait until it is ready.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"of-{os.getpid()}")
    orphan = os.getppid() == 1  # of a session that was interrupted: the first process never ends
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ and not orphan else os.getpid()
    folder = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) < 40 else "/tmp")  # a socket's path: 107 bytes
    folder = folder / f"wb-warm-{os.getuid()}-{session[:12]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} belongs to another user, and programs are started from it"
    address = folder / "forks"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            write_program(folder / "python", (FOLDER / "client.py").read_text(), "-I", "-S")
            with socket.socket(socket.AF_UNIX) as listener, (folder / "errors").open("wb") as errors:
                listener.bind(str(address))
                listener.listen(64)
                subprocess.run(
                    [
                        sys.executable,
                        "-P",
                        str(FOLDER / "server.py"),
                        str(listener.fileno()),
                        str(owner),
                        *LIBRARIES,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
                    cwd="/",
                    start_new_session=True,
                    pass_fds=[listener.fileno()],
                    check=True,
                )
    return str(address)
