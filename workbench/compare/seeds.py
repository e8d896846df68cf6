"""Groups of configurations that differ only in a seed: mean and spread instead of one draw.

One seed is one draw. A difference between two configurations means something only when compared with the spread of
the draws of one configuration.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.compare.comparison import PLACE, Comparison, Configuration
from workbench.specs.reading import flatten

SEEDS = ("seed", "model.seed")
"""The settings that only choose a draw."""

NOTHING_TO_DRAW = {
    "seed": "documents are recorded and none are sampled",
    "model.seed": "weights are loaded from a checkpoint",
}
"""Setting of `SEEDS` -> the case in which it draws nothing."""

_COSTS = ("time", "memory")
"""Groups of metrics that differ between identical runs."""


@dataclass(frozen=True)
class Spread:
    """The finite draws of one number: NaN if there are none; the deviation has n - 1 in the denominator."""

    count: int
    mean: float
    deviation: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """Mean and spread of the draws that exist and are finite."""
        drawn = [float(value) for value in values if value is not None and math.isfinite(value)]
        if not drawn:
            return cls(0, math.nan, math.nan, math.nan, math.nan)
        # Scaled by a power of two, which is exact: sums of huge draws stay finite.
        scale = 2.0 ** max(0, math.frexp(max(map(abs, drawn)))[1] - 900)
        scaled = [value / scale for value in drawn]
        deviation = statistics.stdev(scaled) * scale if len(drawn) > 1 else math.nan
        return cls(len(drawn), statistics.fmean(scaled) * scale, deviation, min(drawn), max(drawn))


@dataclass(frozen=True)
class SeedGroup:
    """The draws of one configuration, in the order of the ablation; its name is what the runs' names share."""

    name: str
    members: tuple[Configuration, ...]

    @property
    def seeds(self) -> list[str]:
        """The seeds of each member: the values of the `SEEDS` settings that vary."""
        varying = self.varying
        return [
            " ".join(str(s) for key, s in zip(SEEDS, seeds_of(c), strict=True) if key in varying) for c in self.members
        ]

    @property
    def varying(self) -> tuple[str, ...]:
        """The settings of `SEEDS` that are not the same in all members."""
        by_key = zip(*map(seeds_of, self.members), strict=True)
        return tuple(key for key, seeds in zip(SEEDS, by_key, strict=True) if len(set(seeds)) > 1)

    @property
    def identical(self) -> tuple[tuple[str, ...], ...]:
        """Names of the members whose records are bitwise identical, one tuple for each set of such members.

        Durations and memory are left out: they always differ. A member that recorded no step is in no set.
        """
        alike: dict[str, list[str]] = {}
        for c in self.members:
            if c.steps:
                alike.setdefault(_recorded(c), []).append(c.name)
        return tuple(tuple(names) for names in alike.values() if len(names) > 1)

    @property
    def all_identical(self) -> bool:
        """True if all members are the same run: together they are one draw."""
        return [len(names) for names in self.identical] == [len(self.members)]

    def identical_note(self) -> str:
        """Return which seeds gave identical runs and why, as a sentence; "" if all draws differ.

        Example:
            >>> group.identical_note()   # doctest: +SKIP
            'seeds 0 and 1 gave identical runs: model.seed draws nothing where weights are loaded from a checkpoint'
        """
        seed_of = dict(zip((c.name for c in self.members), self.seeds, strict=True))
        listed = []
        for names in self.identical:
            *others, last = (seed_of[name] for name in names)
            listed.append(f"{', '.join(others)} and {last}")
        if not listed:
            return ""
        why = " and ".join(f"{key} draws nothing where {NOTHING_TO_DRAW[key]}" for key in self.varying)
        return f"seeds {'; '.join(listed)} gave identical runs: {why}"

    def by_step(self, key: str) -> dict[int, Spread]:
        """Mean and spread of a metric at every step that any of the runs recorded."""
        drawn: dict[int, list[float | None]] = {}
        for record in (record for c in self.members for record in c.steps):
            drawn.setdefault(record["step"], []).append(record.get(key))
        return {step: Spread.of(drawn[step]) for step in sorted(drawn)}


def seed_groups(comparison: Comparison) -> list[SeedGroup]:
    """The configurations with several draws; [] if no two runs differ only in a seed."""
    alike: dict[str, list[Configuration]] = {}
    for c in comparison.configurations:
        settings = flatten(c.settings).items()
        same = repr(sorted((key, repr(value)) for key, value in settings if key not in SEEDS + PLACE))
        alike.setdefault(same, []).append(c)
    return [
        SeedGroup(_common_name([c.name for c in members]), tuple(members))
        for members in alike.values()
        if len(members) > 1 and len({seeds_of(c) for c in members}) == len(members)
    ]


def seeds_of(c: Configuration) -> tuple[Any, ...]:
    """Return the values of the `SEEDS` settings of a run."""
    settings = flatten(c.settings)
    return tuple(settings.get(key) for key in SEEDS)


def _recorded(c: Configuration) -> str:
    """A run's recorded numbers as text, exactly: equal texts mean equal bits."""
    return repr(
        [
            sorted((key, repr(value)) for key, value in record.items() if key.split("/")[0] not in _COSTS)
            for record in c.steps
        ]
    )


def identical_notes(comparison: Comparison) -> list[str]:
    """Return a sentence for each set of seeds that gave identical runs, with the names of its configurations.

    Example:
        >>> identical_notes(comparison)   # doctest: +SKIP
        ['one_rank, cp2: seeds 0 and 1 gave identical runs: model.seed draws nothing where ...']
    """
    names: dict[str, list[str]] = {}
    for group in seed_groups(comparison):
        if note := group.identical_note():
            names.setdefault(note, []).append(group.name)
    return [f"{', '.join(groups)}: {note}" for note, groups in names.items()]


def _common_name(names: Sequence[str]) -> str:
    """The parts between dashes that all names share, in order; the first name if they share none."""
    by_place = zip(*(name.split("-") for name in names), strict=False)
    return "-".join(parts[0] for parts in by_place if len(set(parts)) == 1) or names[0]
