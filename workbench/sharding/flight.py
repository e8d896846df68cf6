"""Flight recorder: each rank's collectives, entered and left, in a small file readable even after the rank was killed.

A rank that hangs or was killed cannot report, so each keeps its last collectives in a memory-mapped file, which the
kernel writes to disk whatever happens to the process.

Each rank numbers the collectives of every process group independently. In a correct program entry #17 of a group is
the same collective on all its ranks: `workbench.launch.waits` finds those that have not entered it, and those that
entered another one. With NCCL, "left" only means that the collective was enqueued.

File, 8-byte words in native byte order:

    header, 128 bytes   magic, rank, pid, entries begun, time of the last sign of life, 1 if the rank ended well,
                        pid of the process that started it, and a number made of the machine's name
    slot, 256 bytes     number, number in its group, group, entered, left (0: not yet), check, length of the text,
                        and the text: name, axis, ranks, shape, dtype, caller

The check is a checksum of all fields that are written once, so a half-written slot is skipped. A word is written
atomically, so "left" needs no check.

Units: times are nanoseconds since 1970.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from workbench.errors import RecordError

CAPACITY = 1024
"""Number of collectives kept per rank: at least one step of a real model, some 500; one step predicts the next."""

TRANSFER = "stage"
"""Beginning of the names of transfers between two ranks, in entries whose ``ranks`` are sender and receiver."""

_MAGIC = int.from_bytes(b"WBFLIGT1", sys.byteorder)
_HEADER, _SLOT = 128, 256
_TEXT_AT = 56
_WORDS = struct.Struct("@7Q")
_CHECKED = struct.Struct("@4Q")
_RANK, _PID, _COUNT, _BEAT, _ENDED, _PARENT, _HOST = 1, 2, 3, 4, 5, 6, 7
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_HERE = Path(__file__).parent
_OWN = {str(_HERE / f"{name}.py") for name in ("flight", "collectives", "mesh", "data_parallel", "pipeline")}
_OWN |= {str(_HERE / "bridge" / f"{name}.py") for name in ("connect", "crossing", "direct", "groups")}
_OWN.add(str(_HERE.parent / "records" / "watching.py"))  # a recorder wraps torch's backward


@dataclass(frozen=True)
class Entry:
    """One collective of one rank.

    Attributes:
        number: counted over all collectives of the rank, from 1.
        seq: counted over those of its process group, from 1.
        group: id of the process group, the same on all its ranks.
        name: of the called function, such as "all_sum".
        axis: of the mesh.
        ranks: global ranks of the group; () if they did not fit.
        shape: of this rank's tensor, as dtype.
        caller: file, relative to the package, and line.
        left_ns: None if it has not left.
    """

    number: int
    seq: int
    group: int
    name: str
    axis: str
    ranks: tuple[int, ...]
    shape: str
    dtype: str
    caller: str
    entered_ns: int
    left_ns: int | None

    @property
    def signature(self) -> tuple[str, str, str]:
        """Name, shape and dtype: all ranks of the group must agree on them."""
        return self.name, self.shape, self.dtype

    @property
    def sender(self) -> int | None:
        """The rank that sends in a transfer between two ranks, and does not wait in it; None in a collective."""
        return self.ranks[0] if self.name.startswith(TRANSFER) and self.ranks else None

    def __str__(self) -> str:
        return _message(self.name, self.axis, self.seq, self.caller)


@dataclass(frozen=True)
class FlightView:
    """Snapshot of a rank's file.

    Attributes:
        count: total number of collectives begun.
        beat_ns: last time that it entered or left one, or began or ended.
        ended: True if it ended well.
        entries: the entries still in the file, oldest first.
    """

    rank: int
    pid: int
    count: int
    beat_ns: int
    ended: bool
    entries: tuple[Entry, ...]

    @property
    def inside(self) -> Entry | None:
        """The collective that the rank has entered and not left; None if there is none."""
        return self.entries[-1] if self.entries and self.entries[-1].left_ns is None else None


def start(path: Path, rank: int) -> None:
    """Start recording the collectives of this process; replaces a file of an earlier process."""
    global _flight
    stop(ended=False)
    _flight = _Flight(path, rank)


def stop(*, ended: bool = True) -> None:
    """Stop recording; a no-op if nothing is recorded. ``ended``: this rank will enter no further collective."""
    global _flight
    if _flight is not None:
        _flight.close(ended)
        _flight = None


def entering(
    name: str,
    axis: str,
    ranks: Sequence[int],
    group: str,
    shape: Sequence[int] = (),
    dtype: object = "",
    *,
    caller: str | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Context manager that records entering and leaving a collective; a no-op unless `start` was called.

    A collective that raises is not marked as left: that is where the rank ended. Arguments are as in `Entry`; ``group``
    is the name of the process group, the same on all its ranks, and ``caller`` is found from the stack if None.
    """
    if _flight is None:
        return _NOTHING
    return _Inside(_flight, _flight.enter(name, axis, ranks, group, tuple(shape), dtype, caller or _caller()))


def caller() -> str | None:
    """Source line that calls a collective, for a backward, which autograd calls. None if nothing is recorded."""
    return None if _flight is None else _caller()


def waiting_in() -> str:
    """Description of the collective that this process is in; "" if in none."""
    return "" if _flight is None or _flight.inside is None else _message(*_flight.inside)


def compact(ranks: Sequence[int]) -> Sequence[int]:
    """Return evenly spaced ranks as a range, others unchanged.

    Example:
        >>> compact([1, 3, 5])
        range(1, 7, 2)
    """
    ranks = tuple(ranks)
    if len(ranks) < 2 or ranks[1] <= ranks[0]:
        return ranks
    step = ranks[1] - ranks[0]
    evenly = range(ranks[0], ranks[-1] + step, step)
    return evenly if tuple(evenly) == ranks else ranks


def read(path: Path) -> FlightView:
    """Read a rank's file, while the rank runs or afterwards.

    Raises:
        RecordError: no such file, or not a flight record.
    """
    content = _content(path)
    header = struct.unpack_from("@6Q", content)
    entries = [entry for at in range(_HEADER, len(content), _SLOT) if (entry := _entry(content[at : at + _SLOT]))]
    entries.sort(key=lambda entry: entry.number)
    return FlightView(header[_RANK], header[_PID], header[_COUNT], header[_BEAT], bool(header[_ENDED]), tuple(entries))


def read_beat(path: Path) -> tuple[int, int]:
    """(pid, time of the last sign of life) of a rank: a cheap check for changes.

    Raises:
        RecordError: no such file, or not a flight record.
    """
    header = struct.unpack_from("@6Q", _content(path, _HEADER))
    return header[_PID], header[_BEAT]


def is_child(path: Path) -> bool:
    """True if this process started the rank that wrote the file, whether or not the rank is alive.

    Raises:
        RecordError: no such file, or not a flight record.
    """
    header = struct.unpack_from("@8Q", _content(path, _HEADER))
    return (header[_PARENT], header[_HOST]) == (os.getpid(), _host())


def flush(path: Path) -> None:
    """Write a rank's file out to its file system, from another process of the rank's machine.

    A network file system shows other machines only what was flushed. Nothing if there is no such file.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        os.fsync(file.fileno())


def _host() -> int:
    return zlib.crc32(os.uname().nodename.encode())


def read_all(folder: Path) -> Mapping[int, FlightView]:
    """Read the files of all ranks in a folder, by rank; unreadable files are skipped."""
    views = {}
    for path in sorted(folder.glob("rank*.flight")):
        with contextlib.suppress(RecordError):
            view = read(path)
            views[view.rank] = view
    return views


class _Flight:
    """Writer of a rank's file."""

    def __init__(self, path: Path, rank: int) -> None:
        # Written under a temporary name first, so that readers always see a complete header, or the old file.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb+") as file:
            # Allocated, not sparse: writing to a hole in a mapped file on a full disk kills the process (SIGBUS).
            os.posix_fallocate(file.fileno(), 0, _HEADER + CAPACITY * _SLOT)
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        self._words[_RANK], self._words[_PID], self._words[_BEAT] = rank, os.getpid(), time.time_ns()
        self._words[_PARENT], self._words[_HOST] = os.getppid(), _host()
        self._words[0] = _MAGIC
        temporary.replace(path)
        self._numbers = itertools.count(1)
        self._seqs: dict[int, itertools.count[int]] = {}
        self._groups: dict[str, int] = {}
        self._texts: dict[Any, tuple[bytes, int]] = {}
        self.inside: tuple[str, str, int, str] | None = None

    def enter(
        self, name: str, axis: str, ranks: Sequence[int], group: str, shape: tuple[int, ...], dtype: object, caller: str
    ) -> int:
        """Write an entry and return its slot."""
        key = (name, axis, ranks if isinstance(ranks, range) else tuple(ranks), shape, dtype, caller)
        cached = self._texts.get(key)
        if cached is None:
            if len(self._texts) > 4 * CAPACITY:
                self._texts.clear()
            text = _text(*key)
            cached = self._texts[key] = text, zlib.crc32(text)
        text, check = cached
        if group not in self._groups:
            number = self._groups[group] = zlib.crc32(group.encode())
            self._seqs[number] = itertools.count(1)
        number = self._groups[group]
        count, seq, now = next(self._numbers), next(self._seqs[number]), time.time_ns()
        slot = _HEADER + (count - 1) % CAPACITY * _SLOT
        memory, at = self._words, slot // 8
        checked = _CHECKED.pack(count, seq, number, now)
        self._map[slot + _TEXT_AT : slot + _TEXT_AT + len(text)] = text
        memory[at + 1], memory[at + 2], memory[at + 3], memory[at + 4] = seq, number, now, 0
        memory[at + 5], memory[at + 6] = zlib.crc32(checked, check), len(text)
        memory[at] = count
        memory[_COUNT], memory[_BEAT] = count, now
        self.inside = name, axis, seq, caller
        return at

    def leave(self, at: int) -> None:
        """Record that the rank has left the collective."""
        now = time.time_ns()
        self._words[at + 4] = now
        self._words[_BEAT] = now
        self.inside = None

    def close(self, ended: bool) -> None:
        self._words[_BEAT] = time.time_ns()
        self._words[_ENDED] = int(ended)
        self._words.release()
        self._map.close()


class _Inside(contextlib.AbstractContextManager[None]):
    """Context of one recorded collective."""

    __slots__ = ("_at", "_flight")

    def __init__(self, flight: _Flight, at: int) -> None:
        self._flight, self._at = flight, at

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._flight.leave(self._at)


_flight: _Flight | None = None
_NOTHING = contextlib.nullcontext()
_skipped_code: dict[CodeType, bool] = {}


def _caller() -> str:
    """The innermost source line outside the collectives, torch and this module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        skip = _skipped_code.get(code)
        if skip is None:
            file = code.co_filename
            in_torch = f"{os.sep}torch{os.sep}" in file and not file.startswith(_PACKAGE)
            skip = _skipped_code[code] = file in _OWN or in_torch
        if not skip:
            return f"{_short(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _message(name: str, axis: str, seq: int, caller: str) -> str:
    return f"{name} over {axis} [#{seq}, {caller}]"


def _short(file: str) -> str:
    return file[len(_PACKAGE) :] if file.startswith(_PACKAGE) else "/".join(Path(file).parts[-2:])


def _text(name: str, axis: str, ranks: Sequence[int], shape: tuple[int, ...], dtype: object, caller: str) -> bytes:
    ranks = compact(ranks)
    ranks_text = f"{ranks.start}:{ranks.stop}:{ranks.step}" if isinstance(ranks, range) else ",".join(map(str, ranks))
    ranks_text = ranks_text if len(ranks_text) <= 40 else ""
    shape_text = "x".join(map(str, shape)) or "scalar"
    fields = [name[:36], axis[:12], ranks_text, shape_text[:32], str(dtype).removeprefix("torch.")[:16], caller[-52:]]
    return "\t".join(fields).encode()[: _SLOT - _TEXT_AT]


def _content(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except OSError as error:
        raise RecordError(
            f"read {path.name}",
            found=type(error).__name__,
            rule="a rank records its collectives from its start",
            fix="the rank did not get that far; read its log",
        ) from None
    if len(content) < _HEADER or struct.unpack_from("@Q", content)[0] != _MAGIC:
        raise RecordError(
            f"read {path.name}",
            found="another file format",
            rule="a file written by `start`",
            fix="run the configuration again",
        )
    return content


def _entry(slot: bytes) -> Entry | None:
    """The entry in a slot; None if it is empty or half-written."""
    number, seq, group, entered, left, check, length = _WORDS.unpack_from(slot)
    text = slot[_TEXT_AT : _TEXT_AT + length]
    if not number or zlib.crc32(_CHECKED.pack(number, seq, group, entered), zlib.crc32(text)) != check:
        return None
    name, axis, ranks_text, shape, dtype, caller = text.decode(errors="replace").split("\t")
    if ":" in ranks_text:
        ranks = tuple(range(*map(int, ranks_text.split(":"))))
    else:
        ranks = tuple(int(rank) for rank in ranks_text.split(",") if rank)
    return Entry(number, seq, group, name, axis, ranks, shape, dtype, caller, entered, left or None)
