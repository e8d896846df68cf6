"""Launchers that outlive the process which asked for them: a kernel, a terminal, a closed browser.

A detached launcher is a process of its own, in a session of its own, that opens the experiment again and launches it
(`workbench.cli.launcher`). It answers once every run has a directory, or with the error. Everything after that is on
disk: who asked may end, and any process may show, wait for or cancel the runs. The jobs still end with their launcher.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from workbench.atomic import from_json, to_json, write_whole
from workbench.errors import LaunchError, RecordError
from workbench.launch.ablation import PlannedRun
from workbench.launch.devices import cores
from workbench.launch.failure_analysis import last_lines
from workbench.policy.sizes import read_sizes
from workbench.records.directory import RunDirectory
from workbench.records.provenance import is_process_alive, this_process

LAUNCHER = "workbench.cli.launcher"
FOLDER = "launchers"
LONG_S = 180.0
"""Launches that are expected to take longer than these few minutes are detached, unless the user decides."""

_TINY_STEP_S = 0.1  # of one rank of a tiny model; experiments/layout_parity: 35 runs of 4 steps in 80 s on two cores
_STEP_S = 2.0  # of a checkpoint; experiments/step/step.json: 1.5 to 3 s for Qwen3-0.6B and 131k tokens on an H200
_TINY_VOCABULARY = 1000  # tokens; a model of letters or digits, as those of data/ are


_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True)
class Launcher:
    """A detached launcher that is alive.

    Attributes:
        pid: its process.
        log: what it prints.
        began_ns: its start, in nanoseconds since 1970.
        doing: "launches" its runs, "watches" them, or "compares" them once all have ended.
    """

    pid: int
    log: Path
    began_ns: int
    doing: str


def start(request: dict[str, Any], runs_dir: Path) -> Launcher:
    """Start a detached launcher, and return when its runs have directories.

    Args:
        request: what `workbench.cli.launcher` needs: the experiment and how to launch it. JSON.
        runs_dir: the folder of the experiment's runs, which gets ``launchers/<pid>.log``.

    Raises:
        WorkbenchError: the one that launching raised there.
        LaunchError: the process ended without an answer.
    """
    folder = runs_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for record in _records(folder):
        if not is_process_alive(record["process"]):
            (folder / f"{record['process']['pid']}.json").unlink(missing_ok=True)
    reading, writing = os.pipe()
    new_log = folder / f"new-{os.getpid()}-{time.time_ns()}.log"
    with os.fdopen(reading, "rb") as answer, new_log.open("wb") as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", LAUNCHER, str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                start_new_session=True,  # no signal of the terminal or of a kernel's process group reaches it
            )
        finally:
            os.close(writing)
        log_path = new_log.rename(folder / f"{process.pid}.log")
        try:
            assert process.stdin is not None, "a pipe was asked for"
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(request).encode())
            answered = answer.read()
        except BaseException:  # an interrupt before it has begun: then nothing is to begin
            process.kill()
            process.wait()
            raise
    _started.append(process)  # for as long as it lives: its end is this process's to collect
    error = pickle.loads(answered) if answered else _no_answer(process, log_path, runs_dir)
    if error is not None:
        process.wait()
        raise error
    return next(each for each in launchers(runs_dir) if each.pid == process.pid)


def launchers(runs_dir: Path) -> list[Launcher]:
    """Return the detached launchers of an experiment that are alive, oldest first."""
    folder = runs_dir / FOLDER
    found = [
        Launcher(record["process"]["pid"], folder / record["log"], record["began_ns"], record["doing"])
        for record in _records(folder)
        if is_process_alive(record["process"])
    ]
    return sorted(found, key=lambda launcher: launcher.began_ns)


@contextlib.contextmanager
def recorded(runs_dir: Path) -> Iterator[Record]:
    """Record this process as a detached launcher while it lives."""
    record = Record(runs_dir / FOLDER / f"{os.getpid()}.json")
    record.write("launches")
    try:
        yield record
    finally:
        record.path.unlink(missing_ok=True)
        log = record.path.with_suffix(".log")
        if log.is_file() and not log.stat().st_size:
            log.unlink()


class Record:
    """The record of a detached launcher, written by itself."""

    def __init__(self, path: Path) -> None:
        self.path, self._began_ns = path, time.time_ns()

    def write(self, doing: str) -> None:
        """Store what it does now; see `Launcher`."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        log = self.path.with_suffix(".log").name
        content = {"process": this_process(), "log": log, "began_ns": self._began_ns, "doing": doing}
        write_whole(self.path, to_json(content))


def expected_seconds(planned: Sequence[PlannedRun], runs_dir: Path, project: Path) -> float:
    """Estimate how long runs take, one rank a core: by earlier runs of the same name, or else by their steps.

    A guess, for nothing but the choice between a detached launcher and one that ends with its process.
    """
    total = 0.0
    for plan in planned:
        sizes = read_sizes(plan.spec.model.source, project)
        step_s = _TINY_STEP_S if sizes and (sizes.vocabulary or math.inf) <= _TINY_VOCABULARY else _STEP_S
        step_s *= max(1.0, plan.world_size / len(cores()))
        for run in reversed(RunDirectory.find(runs_dir, plan.name)):
            with contextlib.suppress(RecordError):
                if times := [step["time/step_ms"] for step in run.steps(partial=True)[1:] if "time/step_ms" in step]:
                    step_s = median(times) / 1e3
                    break
        total += plan.spec.steps * step_s
    return total


def _records(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            yield from_json(path.read_bytes())


def _no_answer(process: subprocess.Popen[bytes], log: Path, runs_dir: Path) -> LaunchError:
    return LaunchError(
        f"launch {runs_dir.parent.name}, detached",
        found=f"the launcher ended with exit code {process.wait()}; {last_lines(log)}",
        rule="it answers once every run has a directory",
        fix=f"read {log}, or launch with detached=False",
    )
