"""The process that torchx starts for a job: its ranks, a watchdog, and the end of both with who launched them.

torchx puts a job in a session of its own, so its ranks would survive a restarted or killed notebook kernel. In
the environment

    WB_PARENT_PID   the process to end with; 0, or none, means to stay
    WB_HANG_S       seconds that others wait for a rank before it is named
    WB_FORK_SERVER  the socket of the launcher's fork server, which has the libraries loaded; none: the ranks are those
                    of `torch.distributed.run`, and each loads them itself
    WB_GRACE_S      seconds from SIGTERM in which ranks save a checkpoint (`workbench.train.preemption`)

A job of Slurm that is preempted within a grace time (GraceTime) and ends by itself would not be requeued: the agent
requests that, once the ranks have saved their checkpoint. A job that Slurm starts again resumes in its run directories.

A job of several nodes has an agent on each; how they meet is in `workbench.launch.nodes`.

The ranks get WB_AGENT_PID, and end with the process that started them. The run directories that they execute one after
another are the arguments of their module up to its first option; each is watched in turn.

Works around: torch's rendezvous looks for the source of every frame of the stack, twice for each of some ten events, to
name events that are not recorded, half of the agent's own CPU time (torch 2.11).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import psutil

_POLL_S = 0.1


def exit_with_parent(parent_pid: int, *, poll_s: float = 0.5, grace_s: float = 10.0) -> threading.Thread:
    """End this process and its children soon after the parent is gone.

    First a SIGTERM to this process, on which torch.distributed.run stops its ranks; after the grace period, remaining
    processes are killed. Polls, because the kernel's own parent-death signal is tied to a thread of the parent. If this
    process has another parent already, that one is gone.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(poll_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(128 + signal.SIGTERM)

    thread = threading.Thread(target=watch, name="leave-with-parent", daemon=True)
    thread.start()
    return thread


def run_dirs_of(arguments: Sequence[str]) -> list[Path]:
    """Run directories among the arguments of torch.distributed.run: those of the module that the ranks run."""
    own = arguments[arguments.index("-m") + 2 :] if "-m" in arguments else ()
    return [Path(path) for path in itertools.takewhile(lambda word: not word.startswith("-"), own)]


def main() -> None:
    """Start the ranks, watch them, and wait for them."""
    parent_pid = int(os.environ.get("WB_PARENT_PID", "0"))
    if parent_pid:
        exit_with_parent(parent_pid)
    if server := os.environ.pop("WB_FORK_SERVER", ""):
        with contextlib.suppress(ConnectionError):
            _fork_ranks(server, sys.argv[1:])
    _run_ranks(sys.argv[1:])


def _fork_ranks(server: str, arguments: Sequence[str]) -> NoReturn:
    """Let a fork server start the ranks, whose agent is another process, and exit as they do.

    Raises:
        ConnectionError: the server is gone.
    """
    from workbench.errors import WorkbenchError
    from workbench.launch.processes import request

    options = argparse.ArgumentParser()
    options.add_argument("--nproc-per-node", type=int)
    options.add_argument("-m", dest="worker")
    options.add_argument("--project", type=Path, default=Path())
    known, _ = options.parse_known_args(arguments)
    cancelled = threading.Event()
    try:
        job = request(server, run_dirs_of(arguments), known.nproc_per_node, {**os.environ}, known.project, known.worker)
    except WorkbenchError as error:
        sys.exit(str(error))
    # not before the answer: a handler would let its wait go on; ranks that start meanwhile cannot connect and leave
    signal.signal(signal.SIGTERM, lambda number, frame: cancelled.set())
    while job.poll(_POLL_S) == "running":
        if cancelled.is_set():
            job.cancel()
    sys.exit(job.poll() != "succeeded")


def _run_ranks(arguments: Sequence[str]) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_ranks

    from workbench.launch import nodes, requeue
    from workbench.launch.runs_watcher import RunsWatcher

    _name_events_by_frames()
    os.environ |= {"WB_AGENT_PID": str(os.getpid()), **nodes.own_gpus(arguments)}
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(requeue.shutdown_timeout_s()))
    run_dirs = run_dirs_of(arguments)
    meeting = nodes.meeting(arguments, run_dirs)
    requeue.reopen_runs(run_dirs)  # before the agents meet, so before any rank begins
    node, count = nodes.this_node(), nodes.nodes_of(arguments)
    watcher = RunsWatcher(run_dirs, node=node, nodes=count) if run_dirs else None
    exit_codes: dict[int, int] = {}
    try:
        run_ranks([*meeting, *arguments])
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise
    finally:
        if watcher is not None:
            watcher.end(exit_codes)
        requeue.request(run_dirs)


def _name_events_by_frames() -> None:
    """Let the rendezvous of torch look at frames alone for the name of the function that reports an event."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    """As torch's `get_method_name`: the function that called the caller, or one further out."""
    return sys._getframe(depth).f_code.co_name


if __name__ == "__main__":
    main()
