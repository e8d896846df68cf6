"""A thread of an agent that watches its ranks in the runs that they execute one after another."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_POLL_S = 0.1


class RunsWatcher:
    """Records this process in the run directories and watches the ranks, in a thread, which does not delay their start.

    A run is watched until each of its ranks has written an exit record; then the next one is.

    Args:
        run_dirs: in the order in which the ranks execute them.
        pids: rank -> pid; None: children of this process that have started to record are ranks.
        node: number of this agent's node.
        nodes: of the job, with an agent each.
    """

    def __init__(
        self, run_dirs: Sequence[Path], pids: Mapping[int, int] | None = None, *, node: int = 0, nodes: int = 1
    ) -> None:
        self.run_dirs, self._pids, self._node, self._nodes = run_dirs, pids, node, nodes
        self._watchdog: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overseer", daemon=True)
        self._thread.start()  # its imports overlap with those of the ranks

    def end(self, exit_codes: Mapping[int, int]) -> None:
        """Stop watching, and record the ranks' exit codes in the order in which they were seen.

        They belong to the run that was watched last, which a failed rank has ended.
        """
        self._stop.set()
        self._thread.join()
        if self._watchdog is not None and exit_codes:
            from workbench.records.agents import of_agent
            from workbench.records.failures import EXIT_CODES

            codes = {str(rank): code for rank, code in exit_codes.items()}
            self._watchdog.run.write_json(of_agent(EXIT_CODES, self._node), codes)

    def _watch(self) -> None:
        from workbench.launch.watchdog import Watchdog
        from workbench.records.directory import RunDirectory
        from workbench.records.provenance import this_process

        runs = [RunDirectory.open(path) for path in self.run_dirs]
        if self._node == 0:
            for run in runs:
                run.note(agent=this_process())
        for run in runs:
            pids = self._pids or functools.partial(own_ranks, run)
            self._watchdog = Watchdog(run, pids, node=self._node, nodes=self._nodes).start()
            while not (self._stop.wait(_POLL_S) or over(run)):
                pass
            self._watchdog.stop()
            if self._stop.is_set():
                return


def over(run: Any) -> bool:
    """True if the ranks have nothing left to do for a run: each has recorded its exit, or it was cancelled before."""
    state = run.state
    if state["state"] == "cancelled" and "rank0" not in state:
        return True
    return len(run.exits().keys() - {None}) == run.spec.layout.world_size


def own_ranks(run: Any) -> dict[int, int]:
    """Rank -> pid of the ranks that have started to record and that this process started; also of ended ones."""
    from workbench.errors import RecordError
    from workbench.sharding.flight import is_child, read_beat
    from workbench.train.watched import flight_path

    pids = {}
    for rank in range(run.spec.layout.world_size):
        with contextlib.suppress(RecordError):
            if is_child(flight_path(run, rank)):
                pids[rank], _ = read_beat(flight_path(run, rank))
    return pids
