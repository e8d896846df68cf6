"""How long a run that goes on will take yet."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

RECENT = 10
"""Steps whose times are looked at."""


class Pace:
    """The ends of a run's last steps, as its records say them.

    Example:
        >>> pace = Pace([{"time/ended_ns": 0}, {"time/ended_ns": 2 * 10**9}, {"time/ended_ns": 4 * 10**9}])
        >>> pace.seconds_left(5)
        10.0
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._ends: list[int] = []
        self.add(records)

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take note of further steps."""
        ends = [int(record["time/ended_ns"]) for record in records if "time/ended_ns" in record]
        self._ends = [*self._ends, *ends][-RECENT - 1:]

    def seconds_left(self, steps: int) -> float | None:
        """For so many steps more, each as long as the last ones in the median; None before two have ended.

        What a step waits for (sampling, a checkpoint) is in it, and so is the pause of a run that was continued, which
        a median passes over.
        """
        if len(self._ends) < 2:
            return None
        return steps * statistics.median(after - before for before, after in pairwise(self._ends)) / 1e9
