"""The run directory: a run's inputs and outputs on disk, file by file in README.md. Every file is written atomically.

It is the source of truth: a notebook, the command line or a comparison only reads it, so a killed kernel
loses nothing. A file is written under a temporary name, flushed and renamed; appended lines carry their own
checksum; JSON is standard JSON (NaN too); nothing is ever unpickled.

This module imports no torch until a tensor is read or written, so that looking at runs stays quick.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench import atomic
from workbench.atomic import append_line, drop_torn_tail, locked, read_lines, to_json, write_whole
from workbench.errors import RecordError, check_kind
from workbench.records.damage import EXIT_TYPES, check_types, unfit
from workbench.records.failures import exit_record, root_cause
from workbench.records.integrity import FIX, refuse_incomplete, refuse_other_types
from workbench.records.provenance import this_process
from workbench.records.states import CORRECTIONS, ENDED, STATES, read_run_json, read_state, status_in
from workbench.specs.reading import parse_spec
from workbench.specs.run import RunSpec

if TYPE_CHECKING:
    from torch import Tensor

_TENSORS_FIX = "run again, with record settings that keep these tensors"

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of runs: a valid folder name everywhere, and never an option of a command."""


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
        self.path, self.spec = path, spec
        self._tail_checked = False
        self._steps_read: tuple[tuple[int, int], list[dict[str, Any]]] | None = None

    @classmethod
    def create(cls, root: Path, name: str, spec: RunSpec, **fields: Any) -> RunDirectory:
        """Create a new, pending run directory; an existing one is never touched.

        ``root``, the folder of all runs of an experiment, is created if missing. ``fields`` are of the initial state; a
        run whose state names no process is never `lost`.

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
            with contextlib.suppress(FileExistsError):  # another process was faster
                path.mkdir()
                break
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
    def open(cls, path: Path | str) -> RunDirectory:
        """Open an existing run directory.

        Raises:
            SpecError: the argument is no path.
            RecordError: it is not one, or its config.json is damaged.
            SpecError: its config.json is of a version with other settings.
        """
        check_kind("open a run", path, (str, Path), "pass the folder of a run, below runs/ of its experiment")
        path = Path(path)
        run = cls(path, cls.read_spec(path))
        _ = run.state
        return run

    @staticmethod
    def read_spec(path: Path) -> RunSpec:
        """Read the settings of the run directory at a path, not its state; the errors are those of `open`."""
        config = read_run_json(path / "config.json", what="a run directory")
        return cast(RunSpec, parse_spec(RunSpec, config, where=f"{path.name}/config.json"))

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
        """The content of state.json, read again each time: see `workbench.records.states.read_state`."""
        return read_state(self.path)

    @property
    def status(self) -> str:
        """The state in one word; `lost` if no process is left that could end the run: see `states.status_in`."""
        return status_in(self.state)

    def set_state(self, state: str, *, unless: str = "", **fields: Any) -> str:
        """Move to a state and store further fields with it; existing fields stay.

        `running` adds this process and started_ns; an ended state adds ended_ns. An ended state is final, but for what
        the first rank cannot know when it writes: that a run which succeeded has failed on another rank, and that one
        which failed was cancelled.

        Args:
            state: the new state.
            unless: a state in which the run is left as it is.
            fields: stored with the state.

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
            ended = current["state"] in ENDED and (current["state"], state) not in CORRECTIONS
            if ended or current["state"] == unless:
                return str(current["state"])
            write_whole(self.path / "state.json", to_json(current | added | fields | {"state": state}))
        return state

    def note(self, **fields: Any) -> None:
        """Store fields with the state and leave the state as it is."""
        with locked(self.path / ".state.lock"):
            write_whole(self.path / "state.json", to_json(self.state | fields))

    def request_cancel(self, by: str) -> None:
        """Request the end of this run from its watcher, from any process."""
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

        ``partial`` returns all readable records, even if a run that succeeded lacks some: for showing a run, not for
        comparing it.

        Raises:
            RecordError: a line before the last is damaged; a run that succeeded lacks a step, or a number that every
                step has: the message names the file and the line.
        """
        path = self.path / "metrics.jsonl"
        if partial or self.state["state"] != "succeeded":
            records = read_lines(path, fix=FIX)
            refuse_other_types(path, records)
            return records
        fingerprint = _fingerprint(path)
        if self._steps_read is None or self._steps_read[0] != fingerprint:
            records = read_lines(path, fix=FIX)
            refuse_other_types(path, records)
            refuse_incomplete(path, records, self.spec.steps)
            self._steps_read = fingerprint, records
        return [dict(record) for record in self._steps_read[1]]

    # ---- tensors and other files ---------------------------------------------------------------------

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Write tensors/<name>.safetensors atomically."""
        return atomic.write_tensors(self._tensor_path(name), tensors)

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Read tensors/<name>.safetensors.

        Raises:
            RecordError: missing or damaged.
        """
        path = self._tensor_path(name)
        return atomic.read_tensors(
            path,
            requested=f"read {self.path.name}/tensors/{path.name}",
            fix=_TENSORS_FIX,
        )

    def stored_tensors(self, name: str, order: Iterable[str] = ()) -> Mapping[str, Tensor]:
        """Open tensors/<name>.safetensors; each tensor is read when it is asked for, in an order of names if given.

        Raises:
            RecordError: as `read_tensors`.
        """
        path = self._tensor_path(name)
        requested = f"read {self.path.name}/tensors/{path.name}"
        return atomic.StoredTensors(path, requested=requested, fix=_TENSORS_FIX, order=order)

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
            rank: None for the agent that starts the ranks.
            coordinates: its place on the mesh, such as {"dp": 0, "cp": 1, "tp": 0}; {} if not known yet.
            error: its exception, or one that describes its failure; None if it succeeded.
            cause: one of `CAUSES`; None reads it from the error.
            waited_in: the collective that it was in, "" if none or unknown.
            stack: Python stack of a rank that hung, "" if unknown.
        """
        record = exit_record(rank, coordinates, error, cause=cause, waited_in=waited_in, stack=stack)
        name = "agent" if rank is None else f"rank{rank:05d}"
        self.write_json(f"ranks/{name}.exit.json", record)

    def exits(self) -> dict[int | None, dict[str, Any]]:
        """Exit records by rank, of the ranks that have one."""
        files = sorted((self.path / "ranks").glob("*.exit.json"))
        records = [read_run_json(file, what="the folder of a run's ranks") for file in files]
        for file, record in zip(files, records, strict=True):
            if not isinstance(record, dict) or not record.keys() >= EXIT_TYPES.keys():
                raise unfit(file, record, f"a mapping with {', '.join(EXIT_TYPES)}")
            check_types(file, record, EXIT_TYPES)
        return {record["rank"]: record for record in records}

    @property
    def ranks_done(self) -> bool:
        """True if it succeeded, and every rank has recorded that its part is done."""
        exits = self.exits().values() if self.state["state"] == "succeeded" else ()
        return len(exits) == self.spec.layout.world_size and all(record["ok"] for record in exits)

    def failure(self) -> dict[str, Any] | None:
        """Root cause: the first rank that failed by itself, not because a peer was gone.

        When a rank dies, the others soon fail with connection errors, sometimes with an earlier time stamp;
        those count only if there is nothing else. A rank that hung or left is detected last, and its victims may have
        died first. The result is that rank's exit record, ``also_failed``, the other ranks that failed, and ``also``,
        the collectives that they were in, by rank. None if no rank failed. Its ``rank`` is None if the ranks never
        started.
        """
        return root_cause(self.exits().values())

    def __repr__(self) -> str:
        """Name, state and progress in a line."""
        return f"RunDirectory({self.path.name}: {self.status}, {len(self.steps())}/{self.spec.steps} steps)"


# ---- files ---------------------------------------------------------------------------------------------


def _fingerprint(path: Path) -> tuple[int, int]:
    """Modification time (ns) and size of a file; (-1, -1), which no file has, if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_mtime_ns, status.st_size
