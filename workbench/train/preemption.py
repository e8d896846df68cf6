"""SIGTERM ends a run with a checkpoint: on a preemption, a time limit, a cancel, the end of its launcher.

A run with `record.checkpoint_every` catches the signal on every rank, whichever of them get it, and

    takes the step that it is in to its end; several ranks take at most one more, to agree on the same one,
    saves a checkpoint after it,
    notes the step in its state and ends every rank by SIGTERM, as without a checkpoint.

No collective is added: the first rank announces, before a step, that it is the last one, through the store of the job.
No rank ends a step that the first rank has not begun, so every rank reads the announcement at the end of that step.

A rank ends at once if waiting cannot help: before its first step, when another rank has failed or is gone, and when
the grace period is over. A thread decides that, because a rank that blocks in a collective handles no signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import psutil

from workbench.errors import RecordError
from workbench.records.directory import RunDirectory
from workbench.records.requeued import STOPPED_AFTER
from workbench.sharding import flight
from workbench.sharding.mesh import job_store
from workbench.train.watched import flight_path

GRACE_S = 25.0
"""Time from SIGTERM until a rank gives up the step that it is in. Slurm (KillWait), Kubernetes
(terminationGracePeriodSeconds) and torch's agent (shutdown_timeout) send SIGKILL after 30 s by default."""

GRACE = "WB_GRACE_S"
"""Environment variable with another grace period, in seconds."""

_POLL_S = 0.1


class Preemption:
    """Agreement of a run's ranks on the step after which they stop; created on the main thread of a rank.

    Args:
        run: whose ranks they are.
        rank: this one.
    """

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self.run, self.rank = run, rank
        self.grace_s = float(os.environ.get(GRACE, GRACE_S))
        self._requested = self._announced = self._stepping = self._saving = False
        self._wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)  # also while a collective blocks
        threading.Thread(target=self._give_up, name="preemption", daemon=True).start()

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal on the main thread."""
        self._requested = True

    def begin_step(self, number: int) -> None:
        """Announce on the first rank that this step is the last one, if a rank got the signal."""
        self._stepping, store = True, self._store
        if store is None or self.rank or self._announced:
            return
        if self._requested or store.check(["requested"]):
            self._announced = True
            store.set("last", str(number))

    def stops_after(self, number: int) -> bool:
        """True on all ranks if the run stops after this step."""
        store = self._store
        if store is None:
            stops = self._requested
        else:
            if self._requested and self.rank:
                store.set("requested", "")
            stops = store.check(["last"]) and int(store.get("last")) <= number
        self._saving = self._saving or stops
        return stops

    def leave(self, steps: int) -> NoReturn:
        """Note the completed steps once the checkpoint is on disk, and end by SIGTERM, the first rank first."""
        store = self._store
        if self.rank == 0:
            self.run.note(**{STOPPED_AFTER: {"step": steps, "time_ns": time.time_ns()}})
        with contextlib.suppress(RuntimeError):  # the store ends with the process that has it
            if store is not None and self.rank == 0:
                store.set("saved", "")
            elif store is not None:
                store.wait(["saved"], datetime.timedelta(seconds=self.grace_s))
        sys.stdout.write(f"stopped by SIGTERM after {steps} steps, with a checkpoint\n")
        sys.stdout.flush()
        sys.stderr.flush()
        end_by_sigterm()

    @property
    def _store(self) -> Any:
        return job_store(timeout_s=self.run.spec.timeout_s, prefix=f"stop/{self.run.path.name}")

    def _give_up(self) -> None:
        """End this rank when waiting for the end of its step cannot help, or has taken too long."""
        while signal.SIGTERM not in self._wake.recv(4096):
            pass
        deadline = time.monotonic() + self.grace_s
        while not self._saving:
            if not self._stepping or time.monotonic() > deadline or self._alone():
                end_by_sigterm()
            time.sleep(_POLL_S)

    def _alone(self) -> bool:
        """True if another rank has failed, or one of this machine is gone before its end."""
        with contextlib.suppress(RecordError, OSError):
            if any(not record["ok"] for record in self.run.exits().values()):
                return True
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        first = int(os.environ.get("GROUP_RANK", "0")) * local
        return any(rank != self.rank and self._is_gone(rank) for rank in range(first, first + local))

    def _is_gone(self, rank: int) -> bool:
        try:
            view = flight.read(flight_path(self.run, rank))
        except RecordError:  # it has not begun
            return False
        try:
            return not view.ended and psutil.Process(view.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return not view.ended


def end_by_sigterm() -> NoReturn:
    """End this process by SIGTERM without its handlers, from any thread."""
    faulthandler.unregister(signal.SIGTERM)
    # signal.signal works on the main thread alone, and that may block in a collective
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # until the kernel delivers it
    os._exit(128 + signal.SIGTERM)
