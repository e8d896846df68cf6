"""How long a run that goes on will take yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CONTINUES = "run/continues"
"""In the record of a step: the run that this one goes on with, whose last step the one before is."""

RECENT = 20
"""Steps whose times are looked at."""


class Pace:
    """The ends of a run's last steps, as its records say them.

    Example:
        >>> pace = Pace([{"time/ended_ns": 0}, {"time/ended_ns": 2 * 10**9}, {"time/ended_ns": 6 * 10**9}])
        >>> pace.seconds_left(5)
        15.0
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._ends: list[int] = []
        self.add(records)

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take note of further steps."""
        for record in records:
            if CONTINUES in record:  # nobody worked between it and the one before
                self._ends = []
            if "time/ended_ns" in record:
                self._ends = [*self._ends, int(record["time/ended_ns"])][-RECENT - 1 :]

    def seconds_left(self, steps: int) -> float | None:
        """For so many steps more, each as long as the last ones in the mean; None before two have ended.

        What lies between steps is in it: sampling, if only every so many steps, and checkpoints.
        """
        if len(self._ends) < 2:
            return None
        return steps * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) / 1e9
