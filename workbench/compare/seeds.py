"""Configurations that differ in nothing but a seed, taken together: mean and spread instead of one draw.

One seed is one draw. A difference between two configurations means something once it is held against how far the draws
of one configuration lie apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.compare.comparison import Comparison, Configuration
from workbench.runs.spec import flatten

SEEDS = ("seed", "model.seed")
"""The settings that only choose a draw."""

_PLACE = ("frozen_clip",)
"""Settings that name another run of the same draw."""


@dataclass(frozen=True)
class Spread:
    """Several draws of one number.

    Attributes:
        count: draws that are numbers.
        mean: of them; NaN of none.
        deviation: their standard deviation, n - 1 in the denominator; NaN of fewer than two.
        low: smallest.
        high: largest.
    """

    count: int
    mean: float
    deviation: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """Mean and spread of the draws that are there and finite."""
        drawn = [float(value) for value in values if value is not None and math.isfinite(value)]
        if not drawn:
            return cls(0, math.nan, math.nan, math.nan, math.nan)
        deviation = statistics.stdev(drawn) if len(drawn) > 1 else math.nan
        return cls(len(drawn), statistics.fmean(drawn), deviation, min(drawn), max(drawn))


@dataclass(frozen=True)
class SeedGroup:
    """The draws of one configuration.

    Attributes:
        name: what the names of its runs have in common.
        members: the runs, in the order of the ablation.
    """

    name: str
    members: tuple[Configuration, ...]

    @property
    def seeds(self) -> list[str]:
        """The seeds, as the settings have them: those of `SEEDS` that vary."""
        flat = [flatten(c.settings) for c in self.members]
        varying = [key for key in SEEDS if len({f.get(key) for f in flat}) > 1]
        return [" ".join(str(f.get(key)) for key in varying) for f in flat]

    def by_step(self, key: str) -> dict[int, Spread]:
        """Mean and spread of a metric at every step that any of the runs recorded."""
        steps = sorted({record["step"] for c in self.members for record in c.steps})
        return {step: Spread.of([record.get(key) for c in self.members for record in c.steps
                                 if record["step"] == step]) for step in steps}


def seed_groups(comparison: Comparison) -> list[SeedGroup]:
    """The configurations of which there are several draws; [] if every run stands for itself."""
    alike: dict[str, list[Configuration]] = {}
    for c in comparison.configurations:
        settings = flatten(c.settings)
        alike.setdefault(repr(sorted((key, repr(value)) for key, value in settings.items()
                                     if key not in SEEDS + _PLACE)), []).append(c)
    return [SeedGroup(_common_name([c.name for c in members]), tuple(members))
            for members in alike.values() if len(members) > 1 and _draws_differ(members)]


def _draws_differ(members: Sequence[Configuration]) -> bool:
    drawn = [tuple(flatten(c.settings).get(key) for key in SEEDS) for c in members]
    return len(set(drawn)) == len(drawn)


def _common_name(names: Sequence[str]) -> str:
    """The parts between dashes that all names share, in order; the first name if they share none."""
    split = [name.split("-") for name in names]
    shared = [part for place, part in enumerate(split[0])
              if all(place < len(other) and other[place] == part for other in split)]
    return "-".join(shared) or names[0]
