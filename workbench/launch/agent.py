"""`torch.distributed.run` with a watchdog, which ends when the process that started it is gone.

torchx puts a job in a session of its own, so its ranks would survive a restarted or killed notebook kernel. In
the environment

    WB_PARENT_PID  the process to end with; 0, or none, means to stay
    WB_HANG_S      seconds that others wait for a rank before it is named

The ranks get WB_AGENT_PID, and end with this process. The run directories that they execute one after another are the
arguments of their module up to its first option; each is watched in turn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


class AgentWatcher:
    """Records this process in the run directories and watches the ranks, in a thread, which does not delay their start.

    A run is watched until each of its ranks has written an exit record; then the next one is.
    """

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self.run_dirs = run_dirs
        self._watchdog: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overseer", daemon=True)
        self._thread.start()  # its imports overlap with those of the ranks

    def end(self, exit_codes: Mapping[int, int]) -> None:
        """Stop watching, and record the exit codes of failed ranks, in the order in which they were seen.

        They belong to the run that was watched last, which a failed rank has ended.
        """
        self._stop.set()
        self._thread.join()
        if self._watchdog is not None and exit_codes:
            from workbench.records.failures import EXIT_CODES

            self._watchdog.run.write_json(f"ranks/{EXIT_CODES}", {str(r): c for r, c in exit_codes.items()})

    def _watch(self) -> None:
        from workbench.launch.watchdog import Watchdog
        from workbench.records.directory import RunDirectory
        from workbench.records.provenance import this_process

        runs = [RunDirectory.open(path) for path in self.run_dirs]
        for run in runs:
            run.note(agent=this_process())
        for run in runs:
            self._watchdog = Watchdog(run, functools.partial(own_ranks, run)).start()
            while not (self._stop.wait(_POLL_S) or over(run)):
                pass
            self._watchdog.stop()
            if self._stop.is_set():
                return


def run_dirs_of(arguments: Sequence[str]) -> list[Path]:
    """Run directories among the arguments of torch.distributed.run: those of the module that the ranks run."""
    own = arguments[arguments.index("-m") + 2 :] if "-m" in arguments else ()
    return [Path(path) for path in itertools.takewhile(lambda word: not word.startswith("-"), own)]


def over(run: Any) -> bool:
    """True if the ranks have nothing left to do for a run: each has recorded its exit, or it was cancelled before."""
    state = run.state
    if state["state"] == "cancelled" and "rank0" not in state:
        return True
    return len(run.exits().keys() - {None}) == run.spec.layout.world_size


def own_ranks(run: Any) -> dict[int, int]:
    """Rank -> pid of the ranks that have started to record: children of this process, and ended ones."""
    from workbench.errors import RecordError
    from workbench.sharding.flight import read_beat
    from workbench.train.watched import flight_path

    pids = {}
    for rank in range(run.spec.layout.world_size):
        with contextlib.suppress(RecordError):
            pid, _ = read_beat(flight_path(run, rank))
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).ppid() != os.getpid():
                    continue
            pids[rank] = pid
    return pids


def main() -> None:
    """Start the ranks, watch them, and wait for them."""
    parent_pid = int(os.environ.get("WB_PARENT_PID", "0"))
    if parent_pid:
        exit_with_parent(parent_pid)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_ranks

    os.environ["WB_AGENT_PID"] = str(os.getpid())
    run_dirs = run_dirs_of(sys.argv[1:])
    overseer = AgentWatcher(run_dirs) if run_dirs else None
    exit_codes: dict[int, int] = {}
    try:
        run_ranks(sys.argv[1:])
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise
    finally:
        if overseer is not None:
            overseer.end(exit_codes)


if __name__ == "__main__":
    main()
