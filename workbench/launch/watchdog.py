"""Watches the ranks of one run from the process that started them, and names the one that the others wait for.

A look costs a read of 128 bytes a rank; only when a rank has been still for a second are the flight records compared
(`workbench.launch.waits`, which also tells what is certain). Then

    certain      its stack is taken, it is killed, its exit record has cause `hang` with the collective, the stack and
                 the ranks that waited; the other ranks are stopped. Within two seconds of the last sign of life.
    not certain  after ``hang_s`` it is named in ranks/waiting.json, with its stack, for readers of the run.
                 No rank is stopped before the ``timeout_s`` of the spec is over: then the backend ends the job, and
                 `workbench.launch.failure_analysis` names the rank that is named there. NCCL takes a minute more for
                 that (measured: 72 s after a time-out of 8 s), so a wait that exceeds it by ten seconds is ended here.

Each node of a job has an agent, which watches the ranks of that node and reads the records of all. The verdict is that
of the agent whose rank is waited for: it has the stack, and can end the rank. The others end their own ranks when they
read the exit record; if that agent is gone, the agent of the first rank that waits writes it.

waiting.json: {"looked_ns": ..., "waiting": [{"rank", "kind", "message", "collective", "waiting", "since_ns", "at",
"stack"}], "was": [...]}; ``waiting`` is an empty list once no rank is waited for, and ``was`` its last content.
``message`` has the time waited until ``looked_ns``.

stopped.json: {rank: ns} of the ranks whose process is in state T (SIGSTOP, Ctrl-Z, a debugger), and the time at which
they were first seen so. Such a rank writes no stack, and ends on SIGKILL alone: when the agent has ended the job it
looks like one that was killed, and this file tells that it was not.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from workbench.errors import RecordError
from workbench.launch.failure_analysis import own_threads, place_of, read_text, write_early_exit, write_hang
from workbench.launch.waits import Wait, find_waits
from workbench.records.agents import of_agent
from workbench.records.directory import RunDirectory
from workbench.records.failures import OOM, STOPPED, WAITING
from workbench.records.provenance import without_machine_paths
from workbench.sharding.flight import FlightView, flush, read, read_beat
from workbench.train.watched import flight_path, stack_path

HANG_S = 20.0
"""Time that others wait for a rank before it is named."""

_STILL_S = 1.0  # a rank without a sign of life for this long may be waiting
_SURE_S = 1.0  # ranks are read one after another: a certain wait must look the same twice
_GONE_S = 15.0  # the parent reports a process that is gone, unless it ended with exit code 0
_STACK_S = 2.0  # time that a rank has to write its stack
_GRACE_S = 3.0  # time that ranks have to end after a signal
_BACKEND_S = 10.0  # time that the backend has to notice that a time-out is over
_REFRESH_S = 10.0  # age at which waiting.json is written again
_ECHO_S = 5.0  # time that ranks of this node have to end by themselves when one of another node has failed
_OTHER_AGENT_S = 15.0  # time that the agent of another node has to end its rank, before that node counts as gone
_STOPPED_STATES = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_FAILING = ("write_exit", "print_exc")  # functions in the stack of a rank that reports its own failure


class Watchdog:
    """A thread that watches ranks.

    Args:
        run: run directory that the ranks write to.
        pids: rank -> pid, as a mapping or as a function that is called at every look.
        hang_s: time that others wait for a rank before it is named; None takes WB_HANG_S, or `HANG_S`.
        poll_s: interval between looks.
        node: number of this node; the ranks of the others are watched by the agents there.
        nodes: of the job.
    """

    def __init__(
        self,
        run: RunDirectory,
        pids: Mapping[int, int] | Callable[[], Mapping[int, int]],
        *,
        hang_s: float | None = None,
        poll_s: float = 0.5,
        node: int = 0,
        nodes: int = 1,
    ) -> None:
        self.run, self.poll_s, self._node, self._nodes = run, poll_s, node, nodes
        self.hang_s = float(os.environ.get("WB_HANG_S", HANG_S)) if hang_s is None else hang_s
        self._pids: Callable[[], Mapping[int, int]] = pids if callable(pids) else lambda: pids
        self._ranks = range(run.spec.layout.world_size)
        self._known: dict[int, int] = {}
        self._processes: dict[int, psutil.Process] = {}  # of ranks that were alive when they were first seen
        self._views: dict[int, FlightView] = {}
        self._moved: dict[int, tuple[int, float]] = {}  # rank -> last sign of life, and when it was first seen here
        self._flushed: dict[int, int] = {}
        self._failed_s: float | None = None  # when the failure of another node's rank was first seen
        self._seen: dict[tuple[int, str, int, int], float] = {}
        self._named: dict[int, dict[str, Any]] = {}
        self._named_s = 0.0
        self._was: list[dict[str, Any]] = []
        self._stopped: dict[int, int] = {}  # rank -> first seen, ns; a rank that was killed while stopped stays here
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._oom_kills = oom_kills()

    def start(self) -> Watchdog:
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop watching; files that are being written are completed."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_STACK_S + 2 * _GRACE_S)
        if self._named and self._all_ended_well():
            self._write_waiting({})
        if (killed := oom_kills() - self._oom_kills) > 0:
            self.run.write_json(of_agent(OOM, self._node), {"oom_kills": killed})

    def _watch(self) -> None:
        while not self._stop.wait(self.poll_s):
            try:
                if self.look():
                    return
            except Exception:  # an error of the watchdog must not end the run
                traceback.print_exc()

    # ---- looking -------------------------------------------------------------------------------------

    def look(self) -> bool:
        """Look once; True if the job was ended."""
        self._update_processes()
        beats = self._read_beats()
        self._write_stopped(time.time_ns())
        if all(rank in beats and self._still_s(rank) < _STILL_S for rank in self._ranks):
            self._write_waiting({})
            return False
        for rank, beat_ns in beats.items():
            if beat_ns and (rank not in self._views or self._views[rank].beat_ns != beat_ns):
                with contextlib.suppress(RecordError):
                    self._views[rank] = read(flight_path(self.run, rank))
        if self._nodes > 1:
            self._flush_still()
            if self._another_node_failed():
                self._end_own()
                return True
        gone = {rank for rank in self._known if not self._lives(rank)}
        done = {rank for rank, view in self._views.items() if view.ended}
        waits = find_waits(self._views, self._ranks, gone | done)
        too_long_s = self.run.spec.timeout_s + _BACKEND_S
        self._seen = {wait.key: self._seen.get(wait.key, time.monotonic()) for wait in waits}
        for wait in waits:
            patience_s = _GONE_S if wait.rank in gone - done else _SURE_S
            patience_s += 0.0 if self._is_ours(wait) else _OTHER_AGENT_S
            hopeless = wait.certain or self._waited_s(wait) >= too_long_s
            lasts = time.monotonic() - self._seen[wait.key] >= patience_s
            if hopeless and lasts and self._judges(wait) and not self._any_failed() and self._end(wait):
                return True
        self._write_waiting({wait.rank: wait for wait in waits if self._waited_s(wait) >= self.hang_s})
        return False

    def _read_beats(self) -> dict[int, int]:
        """Last sign of life of the ranks: of this node's that have been started, and of the others' that have begun."""
        beats = {rank: self._beat(rank) for rank in self._known}
        if self._nodes > 1:
            for rank in set(self._ranks).difference(beats):
                with contextlib.suppress(RecordError):
                    beats[rank] = read_beat(flight_path(self.run, rank))[1]
        for rank, beat_ns in beats.items():
            if beat_ns and self._moved.get(rank, (0, 0.0))[0] != beat_ns:
                self._moved[rank] = beat_ns, time.monotonic()
        return beats

    def _still_s(self, rank: int) -> float:
        """Time since a rank gave a sign of life that was new here, by this process's own clock.

        The times in its record are of a clock that may jump, or of another machine.
        """
        return time.monotonic() - self._moved[rank][1] if rank in self._moved else float("inf")

    def _waited_s(self, wait: Wait) -> float:
        """Time that the first of the waiting ranks has waited: it has not moved since."""
        return max((self._still_s(rank) for rank in wait.waiting if rank in self._moved), default=0.0)

    def _now_ns(self, wait: Wait) -> int:
        """This moment by the clock of the ranks that wait."""
        return wait.entry.entered_ns + round(self._waited_s(wait) * 1e9)

    # ---- several nodes -------------------------------------------------------------------------------

    def _is_ours(self, wait: Wait) -> bool:
        return self._nodes == 1 or wait.rank in self._known

    def _judges(self, wait: Wait) -> bool:
        """True if this agent ends a hopeless job: that of the rank's node, or in its place that of the first waiter."""
        return self._is_ours(wait) or min(wait.waiting) in self._known

    def _flush_still(self) -> None:
        """Show the other agents the records of this node's ranks that wait."""
        for rank in self._known:
            beat_ns, _ = self._moved.get(rank, (0, 0.0))
            if beat_ns and self._still_s(rank) >= _STILL_S and self._flushed.get(rank) != beat_ns:
                flush(flight_path(self.run, rank))
                self._flushed[rank] = beat_ns

    def _another_node_failed(self) -> bool:
        """True if a rank of another node has failed, and this node's had time to notice."""
        exits = self.run.exits().items()
        failed = [rank for rank, record in exits if not record["ok"] and record["cause"] != "peer"]
        if not failed or self._known.keys() & set(failed):
            self._failed_s = None
        elif self._failed_s is None:
            self._failed_s = time.monotonic()
        return self._failed_s is not None and time.monotonic() - self._failed_s >= _ECHO_S

    def _end_own(self) -> None:
        """End the ranks of this node: the job is over, and a backend may keep them waiting for minutes."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self._processes:
                self._signal(rank, number)
            self._wait_for(list(self._processes))

    def _all_ended_well(self) -> bool:
        with contextlib.suppress(RecordError):
            return all(read(flight_path(self.run, rank)).ended for rank in self._ranks)
        return False

    def _update_processes(self) -> None:
        """Add the ranks that have been started."""
        for rank, pid in self._pids().items():
            if self._known.get(rank) != pid:
                self._known[rank] = pid
                with contextlib.suppress(psutil.Error):
                    self._processes[rank] = psutil.Process(pid)

    def _beat(self, rank: int) -> int:
        """Last sign of life of a rank; 0 if it has not begun, or the file is of an earlier process."""
        with contextlib.suppress(RecordError):
            pid, beat_ns = read_beat(flight_path(self.run, rank))
            return beat_ns if pid == self._known[rank] else 0
        return 0

    def _lives(self, rank: int) -> bool:
        with contextlib.suppress(psutil.Error, KeyError):
            process = self._processes[rank]
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    def _is_stopped(self, rank: int) -> bool:
        with contextlib.suppress(psutil.Error, KeyError):
            return self._processes[rank].status() in _STOPPED_STATES
        return False

    def _write_stopped(self, now_ns: int) -> None:
        """Write the stopped ranks to stopped.json, if they changed."""
        stopped = {
            rank: since_ns
            for rank, since_ns in self._stopped.items()
            if self._is_stopped(rank) or not self._lives(rank)
        }
        stopped |= {rank: now_ns for rank in self._processes if rank not in stopped and self._is_stopped(rank)}
        if stopped.keys() != self._stopped.keys():
            self.run.write_json(of_agent(STOPPED, self._node), {str(rank): ns for rank, ns in stopped.items()})
        self._stopped = stopped

    def _any_failed(self) -> bool:
        """True if a rank recorded its failure: then the job ends by itself, for a known reason."""
        return any(not record["ok"] and record["cause"] != "peer" for record in self.run.exits().values())

    # ---- naming --------------------------------------------------------------------------------------

    def _write_waiting(self, waits: Mapping[int, Wait]) -> None:
        """Write the ranks that others wait for to waiting.json, if they changed or the file is old."""
        outdated = time.monotonic() - self._named_s > _REFRESH_S
        if waits.keys() == self._named.keys() and not (waits and outdated):
            return
        now_ns = time.time_ns()
        was = list(self._named.values()) or self._was
        self._named = {rank: self._description(wait) for rank, wait in waits.items()}
        self._named_s = time.monotonic()
        self._was = [] if waits else was
        named = {"looked_ns": now_ns, "waiting": list(self._named.values()), "was": self._was}
        self.run.write_json(of_agent(WAITING, self._node), named)

    def _description(self, wait: Wait) -> dict[str, Any]:
        stack = self.stack_of(wait.rank)
        at = place_of(stack) if stack else ""
        message = wait.message(self._now_ns(wait)) + (f"; it is at {at}" if at else "")
        if wait.rank in self._stopped:
            message += "; its process is stopped (state T in /proc: SIGSTOP, Ctrl-Z or a debugger)"
        return {
            "rank": wait.rank,
            "kind": wait.kind,
            "message": message,
            "collective": str(wait.entry),
            "waiting": list(wait.waiting),
            "since_ns": wait.entry.entered_ns,
            "at": at,
            "stack": stack,
        }

    def stack_of(self, rank: int) -> str:
        """Current Python stacks of a rank; "" if it cannot be signalled or does not answer."""
        if not (rank in self._views and self._lives(rank)) or self._is_stopped(rank):
            return ""  # only a rank with a flight file of its own handles the signal; a stopped one cannot
        path = stack_path(self.run, rank)
        try:
            before = path.stat().st_size
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            deadline, size = time.monotonic() + _STACK_S, before
            while time.monotonic() < deadline:
                time.sleep(0.05)
                size, last = path.stat().st_size, size
                if size > before and size == last:
                    break
            text = path.read_bytes()[before:].decode(errors="replace")
        except OSError:
            return ""
        return without_machine_paths(own_threads(text))

    # ---- ending --------------------------------------------------------------------------------------

    def _end(self, wait: Wait) -> bool:
        """End a hopeless job and record its root cause; False if that rank is about to record its own failure.

        A backend may abort the collective that a rank went on to. The rank then ends, its stack is that of writing its
        exit record, and that record has the place: `workbench.launch.failure_analysis` starts from it.
        """
        now_ns, stack = self._now_ns(wait), self.stack_of(wait.rank)
        if self._is_leaving(wait.rank, stack):
            return False
        view = self._views.get(wait.rank)
        others = [rank for rank in self._processes if rank != wait.rank]
        for rank in others:  # first: otherwise they would report only that the connection to that rank was closed
            self._signal(rank, signal.SIGTERM)
        self._signal(wait.rank, signal.SIGKILL)  # before it overwrites the record that is written here
        self._wait_for([wait.rank])
        if wait.kind == "ended":
            last = str(view.entries[-1]) if view is not None and view.entries else ""
            write_early_exit(self.run, wait, last=last, finished=view is not None and view.ended, cause="hang")
        else:
            write_hang(
                self.run,
                wait.rank,
                wait.message(now_ns),
                certain=wait.certain,
                waited_in=str(view.inside) if view is not None and view.inside is not None else "",
                stack=stack,
                stopped=wait.rank in self._stopped,
            )
        self._wait_for(others)
        for rank in others:
            self._signal(rank, signal.SIGKILL)
        self._wait_for(others)
        return True

    def _is_leaving(self, rank: int, stack: str) -> bool:
        """True if a rank that is still alive has failed by itself, and records it or has done so."""
        failed = not self.run.exits().get(rank, {"ok": True})["ok"]
        return self._lives(rank) and (failed or any(f" in {frame}\n" in stack for frame in _FAILING))

    def _wait_for(self, ranks: Sequence[int]) -> None:
        """Wait until ranks are gone, for the grace period at most."""
        deadline = time.monotonic() + _GRACE_S
        while any(map(self._lives, ranks)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        """Signal a rank, if it is still the one that was started."""
        if self._lives(rank):
            with contextlib.suppress(psutil.Error):
                self._processes[rank].send_signal(number)


def oom_kills(root: Path = Path("/")) -> int:
    """Processes killed for memory so far: in this process's control group if it counts them, or on the machine."""
    groups = [line.split(":", 2) for line in read_text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    files = [root / "sys/fs/cgroup" / path.strip("/") / "memory.events" for number, _, path in groups if number == "0"]
    files += [
        root / "sys/fs/cgroup/memory" / path.strip("/") / "memory.oom_control"
        for _, kinds, path in groups
        if kinds == "memory"
    ]
    for file in [*files, root / "proc/vmstat"]:
        if match := re.search(r"^oom_kill (\d+)$", read_text(file), flags=re.MULTILINE):
            return int(match[1])
    return 0
