"""The agent of ranks in forked processes: forks them, watches them, and leaves no process behind.

It is a fork of the server, so torch is loaded already, and it imports the worker once for all ranks. It does for
them what `torch.distributed.run` does on a cluster: sets the environment of every rank, hosts their store, stops the
others when one has failed, and ends with the process that launched them: the user's, or that of a torchx job.

    launcher -- request -->  agent  -- fork -->  rank 0, rank 1, ...
             <-- started --         <-- exit codes --
             -- cancel -->
             <-- ended --

A rank dies with its agent (by the kernel on Linux, by a thread elsewhere), and the agent stops its ranks when the
launcher is gone, so that no failure leaves a process behind.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import LaunchError
from workbench.launch.runs_watcher import RunsWatcher
from workbench.records.directory import RunDirectory
from workbench.records.provenance import process_alive, this_process, without_machine_paths
from workbench.train.watched import die_with

ECHO_S = 1.0
"""Time that the others have to end by themselves, and record why, when a rank has failed."""

GRACE_S = 5.0
"""Time that a rank has to end after SIGTERM, before SIGKILL."""

LAUNCHER_POLL_S = 0.5


@dataclass(frozen=True)
class Request:
    """A launcher's request to an agent.

    Attributes:
        runs: run directories, which the ranks execute one after another.
        world_size: ranks.
        worker: module whose `main` every rank runs, with the run directories and the project as arguments.
        project: folder that paths in the spec are relative to.
        folder: current folder of the ranks.
        environment: complete environment of the ranks, but for the variables that differ between them.
        launcher: the process to end with, {"pid", "create_time"}.
    """

    runs: list[str]
    world_size: int
    worker: str
    project: str
    folder: str
    environment: dict[str, str]
    launcher: dict[str, Any]


def serve(connection: socket.socket) -> None:
    """Serve the request of one connection until the last rank is gone, then end this process with all its children."""
    with connection.makefile("rb") as file:
        request = Request(**json.loads(file.readline()))
    os.environ.clear()
    os.environ.update(request.environment)
    try:
        os.chdir(request.folder)
        runs = [RunDirectory.open(Path(path)) for path in request.runs]
        _send_output_to(runs[0].path / "ranks" / "agent.log")
        agent = _Agent(request, runs, connection, importlib.import_module(request.worker))
        agent.fork_ranks()
    except BaseException as error:
        text = without_machine_paths("".join(traceback.format_exception(error)))
        _send(connection, refused=f"{type(error).__name__}: {error}", traceback=text)
        traceback.print_exc()
        raise
    try:
        agent.watch()
    except BaseException:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)  # children that a rank left behind, and this process


@dataclass
class _Agent:
    request: Request
    runs: list[RunDirectory]
    connection: socket.socket
    worker: ModuleType
    ranks: dict[int, int] = field(default_factory=dict)  # pid -> rank, of those that run
    exit_codes: dict[int, int] = field(default_factory=dict)  # rank -> code, in the order in which they ended
    store: Any = None  # a reference: the store ends with the last one
    wake: socket.socket = field(init=False)  # readable when a signal has come
    waker: socket.socket = field(init=False)
    stopping: str = ""  # why the ranks are being stopped
    stopping_since_s: float = 0.0
    terminated: bool = False  # SIGTERM was sent

    def fork_ranks(self) -> None:
        """Start the ranks and send their pids to the launcher."""
        _refuse_initialised_cuda()
        self.wake, self.waker = socket.socketpair()
        for end in (self.wake, self.waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self._stop("cancelled"))
        listener = socket.create_server(("127.0.0.1", 0), backlog=self.request.world_size + 8)
        port = listener.getsockname()[1]
        gc.freeze()
        agent = os.getpid()
        for rank in range(self.request.world_size):
            pid = os.fork()
            if pid == 0:
                die_with(agent)
                _reset_signals()
                for end in (listener, self.connection, self.wake, self.waker):
                    end.close()
                _run_rank(self.request, self.runs[0], rank, port, self.worker)
            self.ranks[pid] = rank
        from torch.distributed import TCPStore

        self.store = TCPStore(  # on a port that was bound before the ranks got its number, so that it cannot be taken
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        _send(self.connection, agent=this_process(), ranks={rank: pid for pid, rank in self.ranks.items()})

    def watch(self) -> None:
        """Watch the ranks until the last one is gone."""
        watcher = RunsWatcher([run.path for run in self.runs], {rank: pid for pid, rank in self.ranks.items()})
        self.connection.setblocking(False)
        listening = [self.wake, self.connection]
        look_s = 0.0
        while self._reap():
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + LAUNCHER_POLL_S
                if not process_alive(self.request.launcher["pid"], self.request.launcher["create_time"]):
                    self._stop("left alone")
            self._signal_ranks()
            readable, _, _ = select.select(listening, [], [], 0.1 if self.stopping else LAUNCHER_POLL_S)
            if self.wake in readable:
                self.wake.recv(4096)
            if self.connection in readable:
                with contextlib.suppress(ConnectionError):
                    if b"cancel" in self.connection.recv(4096):
                        self._stop("cancelled")
                        continue
                listening.remove(self.connection)
                self._stop("left alone")
        watcher.end(self.exit_codes)
        failed = "failed" if self.stopping == "failed" else "cancelled"
        ended = failed if any(self.exit_codes.values()) else "succeeded"
        _send(self.connection, ended=ended, exit_codes=self.exit_codes)

    def _reap(self) -> bool:
        """Record the ranks that have ended; True if any is left."""
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in self.ranks:
                rank, code = self.ranks.pop(pid), os.waitstatus_to_exitcode(status)
                self.exit_codes[rank] = code
                if code and not self.stopping:
                    self.stopping, self.stopping_since_s = "failed", time.monotonic() + ECHO_S
        return bool(self.ranks)

    def _stop(self, why: str) -> None:
        if self.stopping in ("", "failed"):
            self.stopping, self.stopping_since_s = why, min(self.stopping_since_s or time.monotonic(), time.monotonic())

    def _signal_ranks(self) -> None:
        """Send SIGTERM when it is time to stop, SIGKILL after the grace period. Pids of own children are not reused."""
        waited_s = time.monotonic() - self.stopping_since_s
        if not self.stopping or waited_s < 0:
            return
        for pid in self.ranks:
            if waited_s > GRACE_S:
                os.kill(pid, signal.SIGKILL)
            elif not self.terminated:
                os.kill(pid, signal.SIGTERM)
        self.terminated = True


def _run_rank(request: Request, run: RunDirectory, rank: int, port: int, worker: ModuleType) -> None:
    """Run the worker's main as this rank; never returns."""
    code = 1
    try:
        _send_output_to(run.log_path(rank))
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": "0",
            "WB_AGENT_PID": str(os.getppid()),
            "WORLD_SIZE": str(request.world_size),
            "LOCAL_WORLD_SIZE": str(request.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # it was seeded before the fork, the same in every rank and every run
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch was loaded before it could read this
        sys.argv = [str(worker.__file__), *request.runs, "--project", request.project]
        code = _exit_code(worker)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # interpreter teardown costs a second a rank


def _exit_code(worker: ModuleType) -> int:
    """Exit code that the interpreter would end with if this module were its main one."""
    try:
        worker.main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _refuse_initialised_cuda() -> None:
    """Refuse to fork after CUDA was initialised, such as by the import of a worker; loading torch does not do so."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise LaunchError(
            "fork ranks from ready processes",
            found="CUDA is initialised already",
            rule="a process that was forked after CUDA was initialised cannot use it",
            fix="let no module touch a GPU while it is imported, or launch torchx jobs instead",
        )


def _reset_signals() -> None:
    """Remove the agent's signal handlers from a rank."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _send_output_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper), "the interpreter's own streams"
        stream.reconfigure(line_buffering=True)


def _send(connection: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone
        connection.sendall(json.dumps(message).encode() + b"\n")
