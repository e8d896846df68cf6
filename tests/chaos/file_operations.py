"""Kill a process at each of its file operations, or let the operation fail, and check what is on disk afterwards.

A forked child writes a run as a rank does, and counts its operations: every file that it opens, every write, flush and
rename. At the chosen one it kills itself with SIGKILL, a write half done, or gets an error of the operating system. It
tells through a pipe what it was told is on disk; the parent reads the run directory and compares.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.launch import resume
from workbench.records.directory import RunDirectory
from workbench.records.states import ENDED
from workbench.specs.run import RunSpec

STEPS = 3
FAILURES = ("ENOSPC", "EDQUOT", "EROFS", "EMFILE", "EIO", "EFBIG")
"""A full disk or no inode left, a quota, a read-only file system, no descriptor left, a broken disk, a size limit."""

LIMITS = {"descriptors": (resource.RLIMIT_NOFILE, (0, 40)), "file size": (resource.RLIMIT_FSIZE, (0, 3000))}
"""Limits of a process, and the range of what is left of each."""


class Operations:
    """Counts the file operations of this process, and does something at one of them.

    Args:
        at: number of that operation, from 1; 0 for none.
        act: called before the operation; for a write with what writes its first half.
    """

    def __init__(self, at: int, act: Callable[[Callable[[], object]], None]) -> None:
        self.at, self.act, self.count = at, act, 0

    def operation(self, half: Callable[[], object] = lambda: None) -> None:
        """Count one operation."""
        self.count += 1
        if self.count == self.at:
            self.act(half)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count the operations of Python's own file functions meanwhile."""
        changed = {(os, name): getattr(os, name) for name in ("open", "fsync", "mkdir", "replace", "rename", "unlink")}
        changed[io, "open"] = io.open
        for (module, name), function in changed.items():
            setattr(module, name, self._counting(function))
        try:
            yield
        finally:
            for (module, name), function in changed.items():
                setattr(module, name, function)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            self.operation()
            result = function(*arguments, **options)
            return _Written(result, self) if isinstance(result, io.BufferedWriter | io.BufferedRandom) else result

        return counting


class _Written:
    """A file whose writes are counted."""

    def __init__(self, file: Any, operations: Operations) -> None:
        self._file, self._operations = file, operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def write(self, content: bytes) -> int:
        def half() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        self._operations.operation(half)
        return int(self._file.write(content))


def write_a_run(root: Path, seed: int, acknowledge: Callable[[str, object], None]) -> None:
    """Write a run directory from its creation to its end, as launcher and first rank do."""
    draw = random.Random(seed)
    with resume.launch_lock(root):
        run = RunDirectory.create(root, "run", RunSpec(steps=STEPS), world_size=1)
    acknowledge("created", run.path.name)
    run.set_state("running")
    for step in range(STEPS):
        record = {"step": step, "noise": "x" * draw.randrange(5000)}
        run.append_step(record)
        acknowledge("step", record)
        run.write_tensors(f"step{step}", {"gradient": torch.full((draw.randrange(1, 400),), float(step))})
        acknowledge("tensors", step)
        run.note(progress=step)
    run.write_exit(0, {}, None)
    run.set_state("succeeded")
    acknowledge("ended", "succeeded")


def child(root: Path, seed: int, operations: Operations, limit: tuple[int, int] | None = None) -> tuple[int, list[Any]]:
    """Run the writer in a fork; its wait status, and what it was told is on disk, and at last its outcome."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)

        def tell(what: str, value: object) -> None:
            os.write(writer, json.dumps([what, value]).encode() + b"\n")

        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            if limit is not None:
                kind, left = limit
                used = len(list(Path("/proc/self/fd").iterdir())) if kind == resource.RLIMIT_NOFILE else 0
                resource.setrlimit(kind, (used + left, resource.getrlimit(kind)[1]))
            with operations.counted():
                write_a_run(root, seed, tell)
            tell("operations", operations.count)
        except (OSError, WorkbenchError) as error:
            tell("refused", f"{type(error).__name__}: {error}"[:500])
        except BaseException:
            tell("traceback", traceback.format_exc()[-2000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        told = [json.loads(line) for line in file.read().split(b"\n")[:-1]]
    return os.waitpid(pid, 0)[1], told


def check(root: Path, told: list[Any], *, killed: bool) -> None:
    """Compare a run directory with what its writer was told, and let another writer go on."""
    promised = {what: [value for kind, value in told if kind == what] for what in ("created", "step", "tensors")}
    runs = [RunDirectory.open(path.parent) for path in root.glob("*/config.json")]
    assert [run.path.name for run in runs] == promised["created"] or not promised["created"], "the run is gone"
    assert not [what for what in told if what[0] == "traceback"], told[-1]
    if not killed:
        left = [path for path in root.rglob("*.tmp") if path.is_file()]
        assert not left, f"left behind: {left}"
    for run in runs:
        steps = run.steps()
        assert [record["step"] for record in steps] == list(range(len(steps)))
        assert steps[: len(promised["step"])] == promised["step"], "a step is lost or changed"
        for step in promised["tensors"]:
            assert (run.read_tensors(f"step{step}")["gradient"] == step).all()
        for path in run.path.glob("tensors/*.safetensors"):
            assert run.read_tensors(path.stem), path
        if run.state["state"] == "succeeded":
            assert len(steps) == STEPS, "succeeded without its steps"
            assert run.ranks_done
        elif run.state["state"] not in ENDED:
            run.append_step({"step": len(steps)})
            assert len(run.steps()) == len(steps) + 1
            assert run.set_state("cancelled") == "cancelled"


def _kill(half: Callable[[], object]) -> None:
    half()
    os.kill(os.getpid(), signal.SIGKILL)


def _failing(number: int) -> Callable[[Callable[[], object]], None]:
    def fail(half: Callable[[], object]) -> None:
        half()
        raise OSError(number, os.strerror(number))

    return fail


def operations_of_a_run(folder: Path, seed: int) -> int:
    """Count the file operations of a run that nothing disturbs."""
    root = _fresh(folder)
    status, told = child(root, seed, Operations(0, _kill))
    check(root, told, killed=False)
    assert (status, told[-1][0]) == (0, "operations"), told[-1:]
    return int(told[-1][1])


def kill_at(folder: Path, seed: int, at: int) -> None:
    """Kill the writer at an operation."""
    root = _fresh(folder)
    status, told = child(root, seed, Operations(at, _kill))
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"operation {at} did not come: {told[-1:]}"
    check(root, told, killed=True)


def fail_at(folder: Path, seed: int, at: int, failure: str) -> None:
    """Let an operation fail. A clean-up after the failure works again, as after a full disk."""
    root = _fresh(folder)
    status, told = child(root, seed, Operations(at, _failing(getattr(errno, failure))))
    assert status == 0, f"the writer ended with {os.waitstatus_to_exitcode(status)}"
    check(root, told, killed=False)


def limited(folder: Path, seed: int, kind: str, left: int) -> None:
    """Run the writer under a limit of the operating system."""
    root = _fresh(folder)
    status, told = child(root, seed, Operations(0, _kill), (LIMITS[kind][0], left))
    assert status == 0, f"the writer ended with {os.waitstatus_to_exitcode(status)}"
    check(root, told, killed=False)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sys.stdout.flush()
    return folder / "runs"
