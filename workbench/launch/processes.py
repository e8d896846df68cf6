"""Runs in processes that have torch loaded already: the ranks of a run are ready in a fraction of a second.

The first run starts a fork server (`forkserver`), which loads torch and the other heavy libraries that a worker needs.
Every run, or torchx job on this machine, is a fork of it (`forks`), which imports the workbench itself, so edits take
effect. All of them end with this process, even if it is killed.

Libraries are loaded once, and some of them read environment variables then (HF_HOME, TORCH_LOGS): if one of
`READ_ON_IMPORT` has changed since, the next run starts another server.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil

from workbench.errors import LaunchError
from workbench.launch import forkserver
from workbench.launch.component import WORKER, environment_of
from workbench.launch.devices import Placement
from workbench.launch.forks import GRACE_S, Request
from workbench.records.directory import RunDirectory
from workbench.records.provenance import own_process, process_alive

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "safetensors.torch",
    "psutil",
    "yaml",
    "pydantic",
    "pydantic.main",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.modeling_auto",
    "transformers.masking_utils",
    "transformers.conversion_mapping:get_checkpoint_conversion_mapping=qwen3",  # compiles 700 patterns, 1 s
    "torch.distributed.tensor",  # of sharded parameters
    "torch._dynamo",  # the first step of an optimizer imports it
)
"""Modules that the server loads. Measured on two cores: 6 s once, where every rank took 5 to 7 s each time."""

READ_ON_IMPORT = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "PYTORCH_",
    "TRITON_",
    "MKL_",
    "OPENBLAS_",
    "LD_",
    "PYTHON",
)
"""Prefixes of environment variables that are read while libraries are loaded."""

START_S = 120.0
"""Time that the first run has to start; loading from a cold disk is slow."""

ANSWER_S = 300.0
"""Time that the server has to answer a request: `START_S` to load, and as long again, and a half, to import the
workbench and its worker on a machine with too much to do. It answers later than that if it, or its fork, is stopped."""

_LONGEST_FOLDER = 80  # the path of a socket has at most 107 bytes (unix(7)), 24 of them for our own names


class ProcessJob:
    """The ranks of one run, or of several one after another.

    Attributes:
        handle: a name with the pid of the agent; no other process can use it.
        agent: {"pid", "create_time"} of the process that started the ranks.
        ranks: rank -> pid.
        exit_codes: rank -> exit code, or -signal, in the order in which they ended; {} until the last has.
    """

    reason, ended_by_scheduler = "", False

    def __init__(self, connection: socket.socket, started: dict[str, Any], received: bytes = b"") -> None:
        self.agent = {key: started["agent"][key] for key in ("pid", "create_time")}
        self.ranks = {int(rank): pid for rank, pid in started["ranks"].items()}
        self.handle = f"processes://{self.agent['pid']}"
        self.exit_codes: dict[int, int] = {}
        self._born = {pid: _create_time(pid) for pid in self.ranks.values()}
        self._connection, self._received, self._ended = connection, received, ""
        self._lock = threading.Lock()

    def poll(self, wait_s: float = 0.0) -> str:
        """Current state: running, succeeded, failed or cancelled, as soon as it has ended or after some seconds."""
        with self._lock:
            return self._poll(wait_s)

    def cancel(self) -> None:
        """End it, and return when it has ended: SIGTERM to every rank, SIGKILL to survivors after the grace period."""
        with self._lock:
            if self._poll(0.0) != "running":
                return
            with contextlib.suppress(OSError):
                self._connection.sendall(b"cancel\n")
            if self._poll(GRACE_S + 2.0) == "running":
                self._kill()
                self._end("cancelled")

    def _poll(self, wait_s: float) -> str:
        deadline = time.monotonic() + wait_s
        while not self._ended:
            if b"\n" in self._received:
                message = json.loads(self._received.partition(b"\n")[0])
                self.exit_codes = {int(rank): code for rank, code in message["exit_codes"].items()}
                self._end(message["ended"])
                break
            if not select.select([self._connection], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return "running"
            data = _receive(self._connection)
            self._received += data
            if not data:  # the agent died before the ranks, which die with it
                self._kill()
                self._end("failed")
        return self._ended

    def _end(self, state: str) -> None:
        self._ended = state
        self._connection.close()
        _running.discard(self)

    def _kill(self) -> None:
        """Send SIGKILL to survivors, by pid and start time."""
        for pid, born in {self.agent["pid"]: self.agent["create_time"], **self._born}.items():
            if process_alive(pid, born):
                with contextlib.suppress(psutil.Error):
                    psutil.Process(pid).kill()


def start(
    runs: Sequence[RunDirectory], world_size: int, placement: Placement, *, project: Path, worker: str = WORKER
) -> ProcessJob:
    """Start the ranks of some runs, as `workbench.launch.jobs.start`, from the fork server; returns when they run.

    Raises:
        LaunchError: the server does not start, or the worker cannot be imported.
    """
    environment = {**os.environ, **environment_of(placement)}
    environment.pop("WB_PARENT_PID", None)  # of a torchx job that this process may be in
    warm_up()
    try:
        return request(address(), [run.path for run in runs], world_size, environment, project, worker)
    except ConnectionError as error:
        raise LaunchError(
            f"start {' and '.join(run.name for run in runs)} in ready processes",
            found=str(error),
            rule="the fork server lives until it has answered",
            fix="run the same command again: another server is started",
        ) from error


def request(
    server: str, runs: Sequence[Path], world_size: int, environment: dict[str, str], project: Path, worker: str
) -> ProcessJob:
    """Let the fork server at an `address` start the ranks of some runs, which end with this process.

    Raises:
        ConnectionError: the server is gone.
        LaunchError: the worker cannot be imported, or no answer came within `ANSWER_S`.
    """
    message = Request(
        runs=[str(path.resolve()) for path in runs],
        world_size=world_size,
        worker=worker,
        project=str(project.resolve()),
        folder=str(Path.cwd()),
        environment=environment,
        launcher=own_process(),
    )
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(server)
        connection.sendall(f"{environment['PYTHONPATH']}\n{json.dumps(asdict(message))}\n".encode())
        answer, rest = _first_message(connection)
        connection.settimeout(None)
    except TimeoutError:
        connection.close()  # ranks that start later cannot connect, and leave
        raise LaunchError(
            f"start {world_size} ranks of run {' and '.join(path.name for path in runs)}",
            found=f"no answer from the fork server within {ANSWER_S:g} s",
            rule="it forks an agent, which imports the worker, and answers",
            fix="see if the server is stopped (state T: SIGSTOP, a debugger), if the import of the worker waits for "
            "something (ranks/agent.log in the run directory), or if the machine has too much to do",
        ) from None
    except OSError as error:
        connection.close()
        raise ConnectionError(f"no fork server at {server}: {error}") from None
    if "agent" not in answer:
        connection.close()
        raise LaunchError(
            f"start {world_size} ranks of run {' and '.join(path.name for path in runs)}",
            found=answer.get("refused") or "the agent ended without a message",
            rule=f"the module {worker} can be imported, and a rank runs its main",
            fix="read ranks/agent.log in the run directory",
        )
    job = ProcessJob(connection, answer, rest)
    _running.add(job)
    return job


def address() -> str:
    """Path of the socket of this process's fork server, which is started if there is none.

    Connections wait until it is ready.
    """
    return _server().address


def warm_up() -> None:
    """Start the server and return when it is ready, so that the first run need not wait.

    Raises:
        LaunchError: it does not start.
    """
    _server().wait()


def shut_down() -> None:
    """End the server and all its runs; the next run starts another."""
    global _started
    with _lock:
        server, _started = _started, None
    if server is None or server.owner != os.getpid():
        return
    for job in list(_running):
        job.cancel()
    server.close()


def server_process() -> dict[str, Any] | None:
    """The server as {"pid", "create_time"}; None if none runs."""
    server = _started
    return None if server is None else {"pid": server.process.pid, "create_time": _create_time(server.process.pid)}


class _Server:
    """The owner's handle of the fork server."""

    def __init__(self) -> None:
        self.owner, self.environment = os.getpid(), _read_on_import()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        self.control, remote = socket.socketpair()
        self.ready, self.lock = False, threading.Lock()
        self.folder = tempfile.TemporaryDirectory(prefix="wb-", dir=_short_folder())  # of this user alone
        self.address = str(Path(self.folder.name) / "forks")
        # -P: nothing is imported from the program's folder. OMP_NUM_THREADS: no thread pool in a process that forks.
        with remote, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(forkserver.__file__)), str(listener.fileno()), *PRELOAD],
                stdin=remote.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd="/",
                start_new_session=True,
                pass_fds=[listener.fileno()],
            )

    def wait(self) -> None:
        """Wait until everything is loaded."""
        with self.lock:
            if self.ready:
                return
            self.control.settimeout(START_S)
            with contextlib.suppress(OSError):
                self.ready = self.control.recv(1) == forkserver.READY
        if not self.ready:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").splitlines()
            shut_down()
            raise LaunchError(
                "start the server of ready processes",
                found=" | ".join(lines[-3:]) or "no answer",
                rule=f"it loads {', '.join(PRELOAD)} within {START_S:g} s",
                fix="check the installation and the memory, or launch torchx jobs instead",
            )

    def close(self) -> None:
        """End it by closing its standard input."""
        self.control.close()
        self.errors.close()
        self.folder.cleanup()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_lock = threading.Lock()
_started: _Server | None = None
_running: set[ProcessJob] = set()
atexit.register(shut_down)


def _server() -> _Server:
    """The server of this process, started if there is none."""
    global _started
    with _lock:
        server = _started if _started is not None and _started.owner == os.getpid() else None
        if server is not None and (server.process.poll() is not None or server.environment != _read_on_import()):
            server.close()  # its forks continue
            server = _started = None
        _started = server or _Server()
        return _started


def _short_folder() -> str | None:
    """The folder for temporary files; /tmp if a socket in it would have too long a name."""
    return None if len(tempfile.gettempdir()) < _LONGEST_FOLDER else "/tmp"


def _read_on_import() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_ON_IMPORT)}


def _first_message(connection: socket.socket) -> tuple[dict[str, Any], bytes]:
    """First line from an agent, {} if it ends before, and the bytes after it."""
    received = b""
    while b"\n" not in received:
        if not (data := connection.recv(65536)):
            return {}, b""
        received += data
    line, _, rest = received.partition(b"\n")
    return json.loads(line), rest


def _receive(connection: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return connection.recv(65536)
    return b""


def _create_time(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return 0.0
