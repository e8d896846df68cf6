"""Which collectives a rank entered and left, in a small file that others can read, also after the rank was killed.

A rank that hangs says nothing, and one that was killed says nothing either. So each rank keeps its last 1024
collectives (a step of a real model has some 500, and a step says what the next one should do) in a file mapped
into its memory. The kernel writes it out whatever becomes of the process; nobody is asked, nothing is sent.

Every collective of a process group has a number in that group, counted on each rank by itself. In a right program
entry #17 of a group is the same collective on all its ranks. Comparing the ranks' files therefore says who has not
come to #17, and who came to something else; that holds also where the host runs ahead of the device (NCCL), and
where having "left" says only that the collective was enqueued. `workbench.launch.waits` does the comparing.

File, 8-byte words of this machine:

    header, 128 bytes   magic, rank, pid, entries begun, time of the last sign of life, 1 if the rank ended well
    slot, 256 bytes     number, number in its group, group, entered, left (0: not yet), check, length of the text,
                        and the text: name, axis, ranks, shape, dtype, caller

The check is a checksum of all that is written once, so a slot that was caught half-written is left out. A word is
written at once, so "left" needs no check.

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
"""Collectives that are kept."""

_MAGIC = int.from_bytes(b"WBFLIGT1", sys.byteorder)
_HEADER, _SLOT = 128, 256
_TEXT_AT = 56
_WORDS = struct.Struct("@7Q")
_CHECKED = struct.Struct("@4Q")
_RANK, _PID, _COUNT, _BEAT, _ENDED = 1, 2, 3, 4, 5
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_OWN = tuple(
    str(Path(__file__).parent / name)
    for name in (
        "flight.py",
        "collectives.py",
        "mesh.py",
        "data_parallel.py",
        "bridge/connect.py",
        "bridge/crossing.py",
        "bridge/direct.py",
        "bridge/groups.py",
        "bridge/replicas.py",
    )
)


@dataclass(frozen=True)
class Entry:
    """One collective of one rank.

    Attributes:
        number: counted over all collectives of the rank, from 1.
        seq: counted over those of its process group, from 1.
        group: which process group, the same number on all its ranks.
        name: the function that was called, such as "all_sum".
        axis: name of the mesh axis.
        ranks: global ranks of the group; () if they did not fit.
        shape: of the tensor that this rank brought.
        dtype: of that tensor.
        caller: file, relative to the package, and line.
        entered_ns: when this rank came.
        left_ns: when it went on; None if it has not.
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
    def what(self) -> tuple[str, str, str]:
        """What all ranks of the group must agree on: name, shape and dtype."""
        return self.name, self.shape, self.dtype

    def __str__(self) -> str:
        """Say it in a few words."""
        return _in_words(self.name, self.axis, self.seq, self.caller)


@dataclass(frozen=True)
class FlightView:
    """A rank's file, as it was when it was read.

    Attributes:
        rank: whose.
        pid: process that wrote it.
        count: collectives begun in all.
        beat_ns: last time that it entered or left one, or began or ended.
        ended: whether it ended well.
        entries: what is left of them, oldest first.
    """

    rank: int
    pid: int
    count: int
    beat_ns: int
    ended: bool
    entries: tuple[Entry, ...]

    @property
    def inside(self) -> Entry | None:
        """The collective that it entered and has not left; None if there is none."""
        last = self.entries[-1] if self.entries else None
        return last if last is not None and last.left_ns is None else None


def start(path: Path, rank: int) -> None:
    """Begin to record the collectives of this process; what another process left in the file is gone."""
    global _flight
    stop(ended=False)
    _flight = _Flight(path, rank)


def stop(*, ended: bool = True) -> None:
    """Record no more; nothing if nothing is recorded.

    Args:
        ended: this rank has done its part, and will come to no other collective.
    """
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
    """The time that this rank spends in a collective, for a ``with``; nothing unless `start` was called.

    A collective that raises was not left: that is where the rank ended.

    Args:
        name: of the function that was called.
        axis: name of the mesh axis.
        ranks: global ranks of its process group.
        group: name of the process group, the same on all its ranks.
        shape: of the tensor that this rank brings.
        dtype: of that tensor.
        caller: from `caller`; None finds it.
    """
    if _flight is None:
        return _NOTHING
    return _Inside(_flight, _flight.enter(name, axis, ranks, group, tuple(shape), dtype, caller or _caller()))


def caller() -> str | None:
    """Where a collective is called from: for a backward, which is called by autograd. None if nothing is recorded."""
    return None if _flight is None else _caller()


def waiting_in() -> str:
    """The collective that this process is in, in words; "" if in none."""
    return "" if _flight is None else _flight.inside()


def compact(ranks: Sequence[int]) -> Sequence[int]:
    """The same ranks as a range, where they are evenly spaced.

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
    """What a rank recorded, while it runs or afterwards.

    Raises:
        RecordError: no such file, or not one of these.
    """
    content = _content(path)
    header = struct.unpack_from("@6Q", content)
    entries = [entry for at in range(_HEADER, len(content), _SLOT) if (entry := _entry(content[at : at + _SLOT]))]
    entries.sort(key=lambda entry: entry.number)
    return FlightView(header[_RANK], header[_PID], header[_COUNT], header[_BEAT], bool(header[_ENDED]), tuple(entries))


def read_beat(path: Path) -> tuple[int, int]:
    """(pid, time of its last sign of life) of a rank: the little of a file that says whether there is news.

    Raises:
        RecordError: no such file, or not one of these.
    """
    header = struct.unpack_from("@6Q", _content(path, _HEADER))
    return header[_PID], header[_BEAT]


def read_all(folder: Path) -> Mapping[int, FlightView]:
    """The files of all ranks in a folder, by rank; a file that cannot be read is left out."""
    views = {}
    for path in sorted(folder.glob("rank*.flight")):
        with contextlib.suppress(RecordError):
            view = read(path)
            views[view.rank] = view
    return views


class _Flight:
    """The file, as its writer has it."""

    def __init__(self, path: Path, rank: int) -> None:
        # A name of its own first: whoever reads the final name finds a whole header, and an older reader its old file.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb+") as file:
            # Reserved, not only long: a write into a hole on a full disk would kill the rank.
            os.posix_fallocate(file.fileno(), 0, _HEADER + CAPACITY * _SLOT)
            self._map = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        self._words[_RANK], self._words[_PID], self._words[_BEAT] = rank, os.getpid(), time.time_ns()
        self._words[0] = _MAGIC
        temporary.replace(path)
        self._numbers = itertools.count(1)
        self._seqs: dict[int, itertools.count[int]] = {}
        self._groups: dict[str, int] = {}
        self._texts: dict[Any, tuple[bytes, int]] = {}
        self._inside: tuple[str, str, int, str] | None = None

    def enter(
        self, name: str, axis: str, ranks: Sequence[int], group: str, shape: tuple[int, ...], dtype: object, caller: str
    ) -> int:
        """Write an entry, and say in which slot."""
        key = (name, axis, ranks if isinstance(ranks, range) else tuple(ranks), shape, dtype, caller)
        known = self._texts.get(key)
        if known is None:
            if len(self._texts) > 4 * CAPACITY:
                self._texts.clear()
            text = _text(*key)
            known = self._texts[key] = text, zlib.crc32(text)
        text, check = known
        number = self._groups.get(group)
        if number is None:
            number = self._groups[group] = zlib.crc32(group.encode())
            self._seqs[number] = itertools.count(1)
        count, seq, now = next(self._numbers), next(self._seqs[number]), time.time_ns()
        slot = _HEADER + (count - 1) % CAPACITY * _SLOT
        words, at = self._words, slot // 8
        checked = _CHECKED.pack(count, seq, number, now)
        self._map[slot + _TEXT_AT : slot + _TEXT_AT + len(text)] = text
        words[at + 1], words[at + 2], words[at + 3], words[at + 4] = seq, number, now, 0
        words[at + 5], words[at + 6] = zlib.crc32(checked, check), len(text)
        words[at] = count
        words[_COUNT], words[_BEAT] = count, now
        self._inside = name, axis, seq, caller
        return at

    def leave(self, at: int) -> None:
        """Note that the rank has gone on."""
        now = time.time_ns()
        self._words[at + 4] = now
        self._words[_BEAT] = now
        self._inside = None

    def inside(self) -> str:
        return "" if self._inside is None else _in_words(*self._inside)

    def close(self, ended: bool) -> None:
        self._words[_BEAT] = time.time_ns()
        self._words[_ENDED] = int(ended)
        self._words.release()
        self._map.close()


class _Inside(contextlib.AbstractContextManager[None]):
    """A rank in a collective."""

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
_passed_over: dict[CodeType, bool] = {}


def _caller() -> str:
    """The innermost place outside of the collectives themselves, torch and this module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        skip = _passed_over.get(code)
        if skip is None:
            file = code.co_filename
            of_torch = f"{os.sep}torch{os.sep}" in file and not file.startswith(_PACKAGE)
            skip = _passed_over[code] = file in _OWN or of_torch
        if not skip:
            return f"{_short(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _in_words(name: str, axis: str, seq: int, caller: str) -> str:
    return f"{name} over {axis} [#{seq}, {caller}]"


def _short(file: str) -> str:
    return file[len(_PACKAGE) :] if file.startswith(_PACKAGE) else "/".join(Path(file).parts[-2:])


def _text(name: str, axis: str, ranks: Sequence[int], shape: tuple[int, ...], dtype: object, caller: str) -> bytes:
    ranks = compact(ranks)
    listed = f"{ranks.start}:{ranks.stop}:{ranks.step}" if isinstance(ranks, range) else ",".join(map(str, ranks))
    listed = listed if len(listed) <= 40 else ""
    shapes = "x".join(map(str, shape)) or "scalar"
    fields = [name[:36], axis[:12], listed, shapes[:32], str(dtype).removeprefix("torch.")[:16], caller[-52:]]
    return "\t".join(fields).encode()[: _SLOT - _TEXT_AT]


def _content(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except OSError as error:
        raise RecordError(
            f"read {path.name}",
            found=type(error).__name__,
            rule="a rank records its collectives from its beginning",
            fix="it did not come so far; read its log",
        ) from None
    if len(content) < _HEADER or struct.unpack_from("@Q", content)[0] != _MAGIC:
        raise RecordError(
            f"read {path.name}",
            found="something else",
            rule="a file that `start` made",
            fix="run the configuration again",
        )
    return content


def _entry(slot: bytes) -> Entry | None:
    """The entry in a slot; None if there is none, or it is only half written."""
    number, seq, group, entered, left, check, length = _WORDS.unpack_from(slot)
    text = slot[_TEXT_AT : _TEXT_AT + length]
    if not number or zlib.crc32(_CHECKED.pack(number, seq, group, entered), zlib.crc32(text)) != check:
        return None
    name, axis, listed, shape, dtype, caller = text.decode(errors="replace").split("\t")
    if ":" in listed:
        ranks = tuple(range(*map(int, listed.split(":"))))
    else:
        ranks = tuple(int(rank) for rank in listed.split(",") if rank)
    return Entry(number, seq, group, name, axis, ranks, shape, dtype, caller, entered, left or None)
