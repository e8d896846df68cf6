"""The run directory: a run's inputs and outputs on disk. Every file is written atomically.

It is the source of truth: a notebook, the command line or a comparison only reads it, so a killed kernel
loses nothing. A file is written under a temporary name, flushed and renamed; appended lines carry their own
checksum; JSON is standard JSON (NaN too); nothing is ever unpickled.

    <experiment>/runs/<name>-<hash8>[-k]/
      config.json                  the canonical spec; hash8 is its content hash
      state.json                   pending | running | succeeded | failed | cancelled | lost; times, processes
      cancel.json                  a request to end the run
      metrics.jsonl                one reduced record per optimizer step, written by rank 0
      provenance.json              versions, git state, command, machine
      ranks/rank00000.log          standard output and error of a rank
      ranks/rank00000.exit.json    a rank's exit: cause, exception, traceback, time
      ranks/exit_codes.json        exit codes of the ranks, from the process that started them
      ranks/rank00000.flight       the collectives that it entered and left, see `workbench.sharding.flight`
      tensors/<name>.safetensors   gradients and per-token values
      certificates/step0000.json   fingerprints behind the hash of a step, see `workbench.records.certificate`
      traces/step0000.json         fingerprints of every module's outputs, see `workbench.train.trace`
      rollouts/step0000/           the samples of an online run before a step, as a rollout dataset
      checkpoints/step0020/        weights and optimizer state after 20 steps, see `workbench.train.checkpoint`

This module imports no torch until a tensor is read or written, so that looking at runs stays quick.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

import workbench
from workbench import atomic as whole_files
from workbench.atomic import (
    append_line,
    checked_line,
    damaged,
    drop_torn_tail,
    from_json,
    read_lines,
    to_json,
    write_whole,
)
from workbench.errors import RecordError
from workbench.specs.run import RunSpec, parse_spec

if TYPE_CHECKING:
    from torch import Tensor

STATES = ("pending", "running", "succeeded", "failed", "cancelled", "lost")
"""States of a run. `lost` is a run that waits or runs although no process is left that could start or end it."""

ENDED = ("succeeded", "failed", "cancelled", "lost")
"""The states that a run does not leave, see `RunDirectory.set_state`."""

STEP_KEYS = ("loss/total/sum", "gradient/norm/global")
"""Numbers that every step record of a run has, or none."""

CLUSTERS = ("slurm", "kubernetes")
"""Backends whose jobs outlive the process that submitted them."""

_CORRECTIONS = (("succeeded", "failed"), ("failed", "cancelled"))

CAUSES = ("exception", "out of memory", "killed", "hang", "early exit", "start", "peer")
"""Causes of a rank's failure; `early exit` is exit code 0 while others waited, `peer` the echo of another rank's end,
`start` a job that never came up."""

RECORDED_LAST = ("hang", "early exit")
"""Causes by which a job's other ranks die first: the record of the rank itself is written after theirs."""

EXIT_CODES = "exit_codes.json"
"""File under a run's ``ranks``: {rank: exit code, or -signal}, in the order in which they ended."""

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of runs: a valid folder name everywhere, and never an option of a command."""

_FIX = "run the configuration again; the run's other files are not affected"
_ABSOLUTE = re.compile(r"(?<![\w./:~*-])/(?:[\w.@+-]+/)+[\w.@+-]+")
_LIBRARY = re.compile(r".*/(?:site-packages|dist-packages|lib/python3\.\d+)/")
_PEER_EXCEPTIONS = (
    "DistNetworkError",
    "DistBackendError",
    "ConnectionError",
    "ConnectionResetError",
    "BrokenPipeError",
)
_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "connection was likely closed",
    "timed out waiting",
    "watchdog caught collective",
    "remote process exited",
    "nccl communicator was aborted",
)
_MEMORY_EXCEPTIONS = ("OutOfMemoryError", "MemoryError")
_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory")


class RunDirectory:
    """One run on disk.

    Example:
        >>> import tempfile
        >>> run = RunDirectory.create(Path(tempfile.mkdtemp()), "cp2", RunSpec(layout={"cp": 2}))
        >>> run.append_step({"step": 0, "loss/total/sum": 0.25})
        >>> run.steps()
        [{'step': 0, 'loss/total/sum': 0.25}]
        >>> run.status
        'pending'
    """

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path = path
        self.spec = spec
        self._tail_checked = False
        self._steps_read: tuple[tuple[int, int], list[dict[str, Any]]] | None = None

    @classmethod
    def create(cls, root: Path, name: str, spec: RunSpec, **fields: Any) -> RunDirectory:
        """Create a new, pending run directory; an existing one is never touched.

        Args:
            root: folder of all runs of an experiment; created if missing.
            name: of the configuration.
            spec: settings of the run.
            fields: of the initial state; a run whose state names no process is never `lost`.

        Raises:
            RecordError: the name cannot be a folder name.
        """
        if not RUN_NAME.fullmatch(name):
            raise RecordError(
                f"create a run named {name!r}",
                found=repr(name),
                rule="letters, digits, '.', '_' and '-', beginning with a letter or digit",
                fix="rename the configuration",
            )
        root.mkdir(parents=True, exist_ok=True)
        while True:
            path = cls.next_path(root, name, spec)
            try:
                path.mkdir()
                break
            except FileExistsError:
                continue  # another process was faster
        run = cls(path, spec)
        (path / "ranks").mkdir()
        state = {"state": "pending", "name": name, "created_ns": time.time_ns()} | fields
        write_whole(path / "state.json", to_json(state))
        # Written last: its presence marks a complete run directory.
        write_whole(path / "config.json", (spec.canonical() + "\n").encode())
        return run

    @staticmethod
    def next_path(root: Path, name: str, spec: RunSpec) -> Path:
        """Return the path that a new run of that name and settings would get."""
        stem = f"{name}-{spec.content_hash()}"
        attempts = (stem if attempt == 1 else f"{stem}-{attempt}" for attempt in itertools.count(1))
        return next(root / folder for folder in attempts if not (root / folder).exists())

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run directory.

        Raises:
            RecordError: it is not one, or its config.json is damaged.
            SpecError: its config.json is of a version with other settings.
        """
        config = _read_json(path / "config.json", what="a run directory")
        run = cls(path, parse_spec(RunSpec, config, where=f"{path.name}/config.json"))
        _ = run.state
        return run

    @classmethod
    def find(cls, root: Path, name: str) -> list[RunDirectory]:
        """Every readable run of that name under root, oldest first."""
        runs = []
        for path in root.glob(f"{name}-*/config.json"):
            with contextlib.suppress(RecordError, ValueError):
                run = cls.open(path.parent)
                if run.name == name:
                    runs.append(run)
        return sorted(runs, key=lambda run: run.state.get("created_ns", 0))

    # ---- state ---------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the configuration."""
        return str(self.state["name"])

    @property
    def state(self) -> dict[str, Any]:
        """The content of state.json.

        Units: keys ending in ``_ns`` count nanoseconds since 1970; ``create_time`` is psutil's, in seconds.

        Raises:
            RecordError: it is missing, damaged, or has no state.
        """
        path = self.path / "state.json"
        state = _read_json(path, what="a run directory")
        if not (isinstance(state, dict) and state.get("state") in STATES and isinstance(state.get("name"), str)):
            raise RecordError(
                f"read {path}",
                found=f"{str(state)[:80]}",
                rule=f"a mapping with a name and a state, one of {', '.join(STATES)}",
                fix="it was damaged after it was written; run the configuration again",
            )
        return state

    @property
    def status(self) -> str:
        """The state in one word; `lost` if no process is left that could start or end the run.

        A run of another machine cannot be checked from here and keeps its recorded state; so does a job in the queue of
        a cluster, which needs no launcher.
        """
        state = self.state
        if state["state"] not in ("pending", "running"):
            return str(state["state"])
        if state["state"] == "pending" and "handle" in state and state.get("backend") in CLUSTERS:
            return "pending"
        processes = [state[role] for role in ("rank0", "agent", "launcher") if role in state]
        return str(state["state"]) if not processes or any(map(is_process_alive, processes)) else "lost"

    def set_state(self, state: str, **fields: Any) -> str:
        """Move to a state and store further fields with it; existing fields stay.

        `running` adds this process and started_ns; an ended state adds ended_ns. An ended state is final, but for what
        the first rank cannot know when it writes: that a run which succeeded has failed on another rank, and that one
        which failed was cancelled.

        Returns:
            The resulting state.

        Raises:
            RecordError: no such state.
        """
        if state not in STATES:
            raise RecordError(
                f"set the state of run {self.path.name} to {state!r}",
                found=repr(state),
                rule=f"one of {', '.join(STATES)}",
                fix="use one of them",
            )
        added: dict[str, Any] = {}
        if state == "running":
            added = {"rank0": this_process(), "started_ns": time.time_ns()}
        elif state in ENDED:
            added = {"ended_ns": time.time_ns()}
        with locked(self.path / ".state.lock"):
            current = self.state
            if current["state"] in ENDED and (current["state"], state) not in _CORRECTIONS:
                return str(current["state"])
            write_whole(self.path / "state.json", to_json(current | added | fields | {"state": state}))
        return state

    def note(self, **fields: Any) -> None:
        """Store fields with the state and leave the state as it is."""
        with locked(self.path / ".state.lock"):
            write_whole(self.path / "state.json", to_json(self.state | fields))

    def request_cancel(self, by: str) -> None:
        """Request the end of this run from its watcher, from any process.

        Args:
            by: origin of the request, such as "notebook" or "command line".
        """
        self.write_json("cancel.json", {"by": by, "time_ns": time.time_ns()})

    @property
    def cancel_requested(self) -> bool:
        """True if the run's end was requested."""
        return (self.path / "cancel.json").exists()

    # ---- step records --------------------------------------------------------------------------------

    def append_step(self, record: Mapping[str, Any]) -> None:
        """Append one step record; it survives a crash after this call.

        There is one writer. A torn last line of an interrupted writer is removed first.

        Raises:
            RecordError: the record is empty, names a key ``crc32``, or does not fit in JSON.
        """
        path = self.path / "metrics.jsonl"
        if not self._tail_checked:
            drop_torn_tail(path)
        self._tail_checked = False  # until this line is whole
        append_line(path, record)
        self._tail_checked = True

    def steps(self, *, partial: bool = False) -> list[dict[str, Any]]:
        """All step records. A last line that a crash tore is left out, if the run did not succeed.

        The file of a run that succeeded is read once and then only when it changes.

        Args:
            partial: return all readable records, even if a run that succeeded lacks some: for showing a run, not for
                comparing it.

        Raises:
            RecordError: a line before the last is damaged; a run that succeeded lacks a step, or a number that every
                step has: the message names the file and the line.
        """
        path = self.path / "metrics.jsonl"
        if partial or self.state["state"] != "succeeded":
            return read_lines(path, fix=_FIX)
        fingerprint = _fingerprint(path)
        if self._steps_read is None or self._steps_read[0] != fingerprint:
            records = read_lines(path, fix=_FIX)
            self._refuse_incomplete(records)
            self._steps_read = fingerprint, records
        return [dict(record) for record in self._steps_read[1]]

    def _refuse_incomplete(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the records of a run that succeeded if they are not those of all its steps.

        Raises:
            RecordError: see `steps`.
        """
        path, expected = self.path / "metrics.jsonl", self.spec.steps
        problem = "no such file" if not path.exists() else ""
        if path.exists() and len(records) != expected:
            lines = path.read_bytes().split(b"\n")
            torn = bool(lines[-1]) or len([line for line in lines if line]) > len(records)
            problem = f"{len(records)} whole records" + ("; the last line is cut or damaged" if torn else "")
        everywhere = [key for key in STEP_KEYS if any(key in record for record in records)]
        for number, record in enumerate(records) if not problem else ():
            if record.get("step") != number:
                problem = f"line {number + 1} is of step {record.get('step')!r}, not {number}"
            elif missing := [key for key in everywhere if not isinstance(record.get(key), int | float)]:
                problem = f"line {number + 1} has no {', '.join(missing)}"
            if problem:
                break
        if problem:
            raise RecordError(
                f"read {self.path.name}/{path.name}",
                found=problem,
                rule=f"a run that succeeded has {expected} step record(s), one of each step, with the same numbers",
                fix=_FIX,
            )

    def check_whole(self) -> None:
        """Check that a run that succeeded still has every file that its step records and its settings imply.

        Only the header of a tensor file is read, for its names and for bytes missing at its end.

        Raises:
            RecordError: a step record or a file of tensors is missing, cut or damaged; the message names it.
        """
        tokens = any((self.path / "tensors").glob("step*.tokens.safetensors"))
        for number, record in enumerate(self.steps()):
            if self.spec.record.gradients == "full" and "gradient_norms" in record:
                self._check_tensors(f"step{number:04d}.gradients", record["gradient_norms"])
            if self.spec.record.tokens and tokens:
                self._check_tensors(f"step{number:04d}.tokens", ())

    def _check_tensors(self, name: str, keys: Collection[str]) -> None:
        path = self._tensor_path(name)
        stored = whole_files.tensor_names(path, requested=f"read {self.path.name}/tensors/{path.name}", fix=_FIX)
        self._refuse_missing(name, stored, keys)

    def _refuse_missing(self, name: str, stored: Collection[str], keys: Collection[str]) -> None:
        if missing := [key for key in keys if key not in stored]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise RecordError(
                f"read {self.path.name}/tensors/{name}.safetensors",
                found=f"no {', '.join(missing[:3])}{more}",
                rule="a gradient of every parameter that the step's record has a norm of",
                fix=_FIX,
            )

    # ---- tensors and other files ---------------------------------------------------------------------

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Write tensors/<name>.safetensors atomically."""
        return whole_files.write_tensors(self._tensor_path(name), tensors)

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Read tensors/<name>.safetensors.

        Raises:
            RecordError: missing or damaged.
        """
        path = self._tensor_path(name)
        return whole_files.read_tensors(
            path,
            requested=f"read {self.path.name}/tensors/{path.name}",
            fix="run again, with record settings that keep these tensors",
        )

    def read_gradients(self, step: int) -> dict[str, Tensor]:
        """Whole gradients of a step, in the order of the model (a file sorts names alphabetically).

        Raises:
            RecordError: there is no such step; the file is missing or damaged, or lacks a parameter.
        """
        records = self.steps()
        if not 0 <= step < len(records):
            raise RecordError(
                f"read the gradients of step {step} of {self.path.name}",
                found=f"{len(records)} step(s)",
                rule="a step that the run took",
                fix=_FIX,
            )
        name = f"step{step:04d}.gradients"
        gradients = self.read_tensors(name)
        order = records[step].get("gradient_norms", gradients)
        self._refuse_missing(name, gradients, order)
        return {key: gradients[key] for key in order}

    def has_tensors(self, name: str) -> bool:
        """True if tensors/<name>.safetensors exists."""
        return self._tensor_path(name).exists()

    def _tensor_path(self, name: str) -> Path:
        return self.path / "tensors" / f"{name}.safetensors"

    def write_json(self, name: str, value: Any) -> Path:
        """Write a JSON file (such as provenance.json) atomically."""
        return write_whole(self.path / name, to_json(value))

    def checkpoints(self) -> dict[int, Path]:
        """Folders of the stored checkpoints by number of completed steps, oldest first.

        See `workbench.train.checkpoint`.
        """
        folders = {int(path.name.removeprefix("step")): path for path in (self.path / "checkpoints").glob("step[0-9]*")}
        return dict(sorted(folders.items()))

    # ---- exits of ranks ------------------------------------------------------------------------------

    def log_path(self, rank: int) -> Path:
        """Path of a rank's standard output and error."""
        return self.path / "ranks" / f"rank{rank:05d}.log"

    def write_exit(
        self,
        rank: int | None,
        coordinates: Mapping[str, int],
        error: BaseException | None,
        *,
        cause: str | None = None,
        waited_in: str = "",
        stack: str = "",
    ) -> None:
        """Record a rank's exit as soon as it happens: the order of failures is read from these files.

        Messages and tracebacks are stored without machine paths, because reports quote them.

        Args:
            rank: global rank; None for the agent that starts the ranks.
            coordinates: its place on the mesh, such as {"dp": 0, "cp": 1, "tp": 0}; {} if not known yet.
            error: its exception, or one that describes its failure; None if it succeeded.
            cause: one of `CAUSES`; None reads it from the error.
            waited_in: the collective that it was in, "" if none or unknown.
            stack: Python stack of a rank that hung, "" if unknown.
        """
        record: dict[str, Any] = {
            "rank": rank,
            "coordinates": dict(coordinates),
            "time_ns": time.time_ns(),
            "ok": error is None,
            "cause": None,
            "exception": None,
            "message": "",
            "traceback": "",
            "waited_in": waited_in,
            "stack": without_machine_paths(stack),
        }
        if error is not None:
            text = "".join(traceback.format_exception(error))
            record |= {
                "cause": cause or cause_of(error),
                "exception": type(error).__name__,
                "message": without_machine_paths(str(error)),
                "traceback": without_machine_paths(text),
            }
        name = "agent" if rank is None else f"rank{rank:05d}"
        self.write_json(f"ranks/{name}.exit.json", record)

    def exits(self) -> dict[int | None, dict[str, Any]]:
        """Exit records by rank, of the ranks that have one."""
        files = sorted((self.path / "ranks").glob("*.exit.json"))
        records = [_read_json(file, what="the folder of a run's ranks") for file in files]
        return {record["rank"]: record for record in records}

    def failure(self) -> dict[str, Any] | None:
        """Root cause: the first rank that failed by itself, not because a peer was gone.

        When a rank dies, the others soon fail with connection errors, sometimes with an earlier time stamp;
        those count only if there is nothing else. A rank that hung or left is detected last, and its victims may have
        died first. The result is that rank's exit record, ``also_failed``, the other ranks that failed, and ``also``,
        the collectives that they were in, by rank. None if no rank failed. Its ``rank`` is None if the ranks never
        started.
        """
        failed = [record for record in self.exits().values() if not record["ok"]]
        if not failed:
            return None
        first = min(
            failed,
            key=lambda record: (record["cause"] == "peer", record["cause"] not in RECORDED_LAST, record["time_ns"]),
        )
        others = [record for record in failed if record is not first]
        return first | {
            "also_failed": [record["rank"] for record in others],
            "also": {record["rank"]: record["waited_in"] for record in others if record["waited_in"]},
        }

    def __repr__(self) -> str:
        """Name, state and progress in a line."""
        return f"RunDirectory({self.path.name}: {self.status}, {len(self.steps())}/{self.spec.steps} steps)"


class StepTail:
    """Step records of a run as they are written: each call reads only the new ones.

    Example:
        >>> tail = StepTail(run)   # doctest: +SKIP
        >>> tail.new()             # doctest: +SKIP
        [{'step': 0, 'loss/total/sum': 0.25}]
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records since the last call; an incomplete last line follows once it is complete.

        Raises:
            RecordError: a line before the last is damaged.
        """
        try:
            with (self.run.path / "metrics.jsonl").open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        records = []
        *whole, rest = content.split(b"\n")
        for index, line in enumerate(whole):
            record = checked_line(line)
            if record is None:
                if rest or index < len(whole) - 1:
                    raise damaged(self.run.path / "metrics.jsonl", "a line before the last", fix=_FIX)
                break  # torn; its writer cuts it off before the next record
            records.append(record)
            self._offset += len(line) + 1
        return records


def failure_summary(failure: Mapping[str, Any]) -> str:
    r"""One-line summary of a failure: rank, exception, and the requested and found parts of its message.

    Example:
        >>> failure_in_short({"rank": 1, "exception": "ShapeError", "message": "split 7 tokens\n  found: an odd row"})
        'rank 1 ShapeError: split 7 tokens; found: an odd row'
    """
    lines = str(failure.get("message", "")).splitlines()
    parts = [*lines[:1], *(line.strip() for line in lines[1:] if line.startswith("  found: "))][:2]
    rank = "" if failure.get("rank") is None else f"rank {failure['rank']} "
    named = ("out of memory", "killed", *RECORDED_LAST)
    cause = f" ({failure['cause']})" if failure.get("cause") in named else ""
    return f"{rank}{failure.get('exception', 'failed')}{cause}" + (f": {'; '.join(parts)}" if parts else "")


def cause_of(error: BaseException) -> str:
    """Cause of a rank's failure, from its exception: "out of memory", "peer" or "exception"."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    if kinds.intersection(_MEMORY_EXCEPTIONS) or any(message in text for message in _MEMORY_MESSAGES):
        return "out of memory"
    return "peer" if is_connection_error(error) else "exception"


def is_connection_error(error: BaseException) -> bool:
    """True if an exception is the echo of a peer's death and not a failure of its own.

    The innermost exception of the chain decides: a lost connection is recognised inside another error, and one
    during the cleanup after a real failure does not hide that failure.
    """
    while inner := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = inner
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return bool(kinds.intersection(_PEER_EXCEPTIONS)) or any(message in text for message in _PEER_MESSAGES)


# ---- project folder and provenance ---------------------------------------------------------------------


def project_root(start: Path | None = None) -> Path:
    """The folder that paths in specs (``data/...``, ``experiments/...``) are relative to.

    That is the starting folder (by default the current one) if it has a `data` folder, and otherwise the
    source tree of this package.
    """
    start = (start or Path.cwd()).resolve()
    return start if (start / "data").is_dir() else Path(workbench.__file__).resolve().parent.parent


def without_machine_paths(text: str, project: Path | None = None) -> str:
    """Make absolute paths relative to the project; elsewhere keep only the part that identifies the file.

    Example:
        >>> without_machine_paths('File "/home/me/lib/python3.12/site-packages/torch/nn/init.py", line 3')
        'File ".../torch/nn/init.py", line 3'
    """
    roots = {str(project or project_root()), str(Path(workbench.__file__).resolve().parent.parent)}
    for root in sorted(roots, key=len, reverse=True):
        text = text.replace(f"{root}/", "")
    return _ABSOLUTE.sub(_shortened, text)


def _shortened(path: re.Match[str]) -> str:
    inside_library = _LIBRARY.sub("", path[0])
    return f".../{Path(path[0]).name if inside_library == path[0] else inside_library}"


def versions() -> dict[str, str]:
    """Installed versions of the packages that numbers or records depend on."""
    return {"workbench": workbench.__version__, "python": platform.python_version()} | {
        name: _version(name) for name in ("torch", "transformers", "triton", "torchx", "safetensors")
    }


def provenance(project: Path, *, seed: int | None = None) -> dict[str, Any]:
    """Provenance of a run's numbers: versions, git state, command, machine.

    It has no host name and no path outside the project, because reports are shared. A GPU is named only if
    torch is already loaded: importing torch would cost two seconds.
    """
    torch = sys.modules.get("torch")
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "git": _git_state(project),
        # A loaded torch names its build too (+cpu, +cu130), which the package metadata lacks.
        "versions": versions() | ({} if torch is None else {"torch": str(torch.__version__)}),
        "argv": [without_machine_paths(argument, project) for argument in sys.argv],
        "seed": seed,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        "written_ns": time.time_ns(),
    }


def _git_state(project: Path) -> dict[str, Any]:
    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(project), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return {"commit": commit or "unknown", "dirty": "unknown" if changes is None else bool(changes)}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


# ---- processes -----------------------------------------------------------------------------------------


def this_process() -> dict[str, Any]:
    """Identity of this process for a state; a pid alone may be reused by tomorrow.

    Units: ``create_time`` is psutil's, in seconds; ``host`` and ``boot`` are hashes, and reveal nothing by themselves.
    """
    return {"pid": os.getpid(), "create_time": psutil.Process().create_time()} | _machine()


def process_alive(pid: int, create_time: float) -> bool:
    """True if a process of this machine is alive, and is not a later one with the same pid."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - create_time) < 0.01 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def is_process_alive(process: Mapping[str, Any]) -> bool:
    """True if a process described by `this_process` is alive, or on another machine, where it cannot be checked."""
    if not is_of_this_machine(process):
        return True
    boot = _machine()["boot"]
    return process.get("boot", boot) == boot and process_alive(process["pid"], process["create_time"])


def is_of_this_machine(process: Mapping[str, Any]) -> bool:
    """True if a process described by `this_process` belongs to this machine, so that its pid is valid here."""
    return process.get("host", _machine()["host"]) == _machine()["host"]


@functools.cache
def _machine() -> dict[str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf8")
    except OSError:
        boot = f"{psutil.boot_time():.0f}"
    return {
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "boot": hashlib.sha256(boot.encode()).hexdigest()[:8],
    }


# ---- files ---------------------------------------------------------------------------------------------


def _fingerprint(path: Path) -> tuple[int, int]:
    """Modification time (ns) and size of a file; (-1, -1), which no file has, if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_mtime_ns, status.st_size


def _read_json(path: Path, *, what: str) -> Any:
    try:
        return from_json(path.read_bytes())
    except FileNotFoundError:
        raise RecordError(
            f"read {path}",
            found="no such file",
            rule=f"{what} has {path.name}",
            fix="check the path, or run the configuration again",
        ) from None
    except (OSError, ValueError) as error:
        raise RecordError(
            f"read {path}",
            found=f"{type(error).__name__}: {error}",
            rule="a whole JSON file",
            fix="it was damaged after it was written; run the configuration again",
        ) from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, one process and thread at a time; it is released when its process ends."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
