"""Progress of a run, from its step records as they are written: new ones, their number, and the remaining time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from workbench.atomic import checked_line, damaged, unreadable
from workbench.records.directory import RunDirectory
from workbench.records.integrity import FIX

CONTINUES = "run/continues"
"""Key of a step record: the run that this one continues, whose last step precedes it."""

RECENT = 20
"""Steps that the mean step time is taken over."""


class Pace:
    """End times of a run's last steps, from its records.

    Example:
        >>> pace = Pace([{"time/ended_ns": 0}, {"time/ended_ns": 2 * 10**9}, {"time/ended_ns": 6 * 10**9}])
        >>> pace.seconds_left(5)
        15.0
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._ends: list[int] = []
        self.add(records)

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add further steps."""
        for record in records:
            if CONTINUES in record:  # the pause before it is no step time
                self._ends = []
            if "time/ended_ns" in record:
                self._ends = [*self._ends, int(record["time/ended_ns"])][-RECENT - 1 :]

    def seconds_left(self, steps: int) -> float | None:
        """Estimate the time of further steps from the mean of the last ones; None before two have ended.

        It includes the time between steps: sampling, if only every so many steps, and checkpoints.
        """
        if len(self._ends) < 2:
            return None
        return steps * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) / 1e9


class StepTail:
    """Step records of a run as they are written: each call reads only the new ones.

    Attributes:
        count: records read so far. A requeued job takes the steps after the last checkpoint again, in a new file; then
            it is that of the new file.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run, self._offset, self._file, self.count = run, 0, -1, 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records since the last call; an incomplete last line follows once it is complete.

        Raises:
            RecordError: a line before the last is damaged.
        """
        try:
            with (self.run.path / "metrics.jsonl").open("rb") as file:
                if (number := os.fstat(file.fileno()).st_ino) != self._file:
                    self._offset, self._file, self.count = 0, number, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.run.path / "metrics.jsonl", error, fix=FIX) from None
        records = []
        *whole, rest = content.split(b"\n")
        for index, line in enumerate(whole):
            record = checked_line(line)
            if record is None:
                if rest or index < len(whole) - 1:
                    raise damaged(self.run.path / "metrics.jsonl", "a line before the last", fix=FIX)
                break  # torn; its writer cuts it off before the next record
            records.append(record)
            self._offset += len(line) + 1
            self.count += 1
        return records


def steps_recorded(run: RunDirectory) -> int:
    """Number of steps on disk, counted without parsing: a damaged line counts, a torn last one does not.

    Raises:
        RecordError: the file cannot be read, such as a folder of its name.
    """
    count, path = 0, run.path / "metrics.jsonl"
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                count += block.count(b"\n")
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(path, error, fix=FIX) from None
    return count
