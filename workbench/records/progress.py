"""Remaining time of a running run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
