"""Rows of a model's outputs (`workbench.records.outputs.ROW`), and what two of them have in common."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

UNIFORM = 1e-2
"""Relative distance of a row's n sum(w^2) from (sum |w|)^2 below which all of its weights are one."""


class Row(NamedTuple):
    """A row of one call; see `workbench.records.outputs.ROW`."""

    call: int
    trained: int
    positive: int
    places: str
    targets: str
    weight: float
    size: float
    square: float
    logprob: float
    entropy: float
    clear: int | None = None

    @property
    def unclear(self) -> bool:
        """True if targets of some predictions are not known: they weigh next to nothing beside an entropy."""
        return self.clear is not None and self.clear < self.trained

    @property
    def uniform(self) -> bool:
        """True if all weights of the row are one."""
        return self.size > 0 and self.trained * self.square <= self.size**2 * (1 + UNIFORM)


def scaled(one: Sequence[float], other: Sequence[float]) -> list[tuple[float, float, float]]:
    """Each number of both, with the size that its rounding follows: a sum of gradients cancels, their sizes do not."""
    scales = (0.0, one[0], one[3], 0.0)
    return [(a, b, scale) for a, b, scale in zip(one, other, scales, strict=True)]


def ratio_of(one: Row, two: Row) -> float:
    """Ratio of a row's weights, by sizes, which do not cancel; with the sign of the sums where they have one."""
    size = two.size / one.size
    signed = abs(one.weight) > one.size / 2 and abs(two.weight) > two.size / 2
    return math.copysign(size, one.weight * two.weight) if signed and two.size else size


def alike(one: Row, two: Row, bar: float) -> bool:
    """True if the weights of two rows may differ by one factor."""
    if not one.size or not two.size:
        return one.size == two.size
    spreads = [row.square / row.size**2 for row in (one, two)]
    signs = {(one.positive, one.trained), (one.trained - one.positive, one.trained)}
    return abs(spreads[1] / spreads[0] - 1) <= 2 * bar and (two.positive, two.trained) in signs


def differ(one: Row, two: Row) -> bool:
    """True if the targets of two rows are known and not the same."""
    return one.targets != two.targets and not one.unclear and not two.unclear


def spread(values: Sequence[float]) -> float:
    """Largest over smallest of positive numbers, less 1."""
    return max(values) / min(values) - 1 if min(values) > 0 else math.inf


def grouped(pieces: Sequence[tuple[int, float]], bar: float) -> list[tuple[int, float]]:
    """Pieces of one ratio, put together."""
    groups: list[tuple[int, float]] = []
    for n, ratio in sorted(pieces, key=lambda each: each[1]):
        if groups and abs(ratio / groups[-1][1] - 1) <= 2 * bar:
            groups[-1] = (groups[-1][0] + n, groups[-1][1])
        else:
            groups.append((n, ratio))
    return groups


def one_side_lost(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """True if the rows that the others lack are all those of one sign of weights; several have each sign."""
    left = Counter((row.trained, row.targets) for row in others)
    signs = {True: [0, 0], False: [0, 0]}
    for row in rows:
        key = (row.trained, row.targets)
        signs[row.weight > 0][left[key] > 0] += 1
        left[key] -= 1
    return all(0 in each and sum(each) > 1 for each in signs.values())
