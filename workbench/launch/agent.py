"""`torch.distributed.run` with a watchdog, which ends when the process that started it is gone.

torchx puts a job in a session of its own, so its ranks would survive a restarted or killed notebook kernel. In
the environment

    WB_PARENT_PID  the process to end with; 0, or none, means to stay
    WB_RUN_DIR     the run directory; without it there is no watchdog
    WB_HANG_S      seconds that others wait for a rank before it is named

The ranks get WB_AGENT_PID, and end with this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil


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
    """Records this process in a run directory and watches the ranks, in a thread, which does not delay their start."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._watchdog: Any = None
        self._thread = threading.Thread(target=self._begin, name="overseer", daemon=True)
        self._thread.start()  # its imports overlap with those of the ranks

    def end(self, exit_codes: Mapping[int, int]) -> None:
        """Stop watching, and record the exit codes of failed ranks, in the order in which they were seen."""
        self._thread.join()
        if self._watchdog is not None:
            self._watchdog.stop()
            if exit_codes:
                from workbench.records.failures import EXIT_CODES

                self._watchdog.run.write_json(f"ranks/{EXIT_CODES}", {str(r): c for r, c in exit_codes.items()})

    def _begin(self) -> None:
        from workbench.launch.watchdog import Watchdog
        from workbench.records.directory import RunDirectory
        from workbench.records.provenance import this_process

        run = RunDirectory.open(self.run_dir)
        run.note(agent=this_process())
        self._watchdog = Watchdog(run, lambda: own_ranks(run)).start()


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
    run_dir = os.environ.get("WB_RUN_DIR")
    overseer = AgentWatcher(Path(run_dir)) if run_dir else None
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
