"""Metrics as values that can be merged: over micro-batches, over ranks, in any order, also with an empty rank.

A mean of means is not a mean. Four tokens with ratios 1, 1, 1, 5 on two ranks as (1) and (1, 1, 5) average to
1.67 if each rank averages first; the mean is 2. So a mean travels as (sum, count), and a maximum of nothing is
minus infinity, not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis


class Value(Protocol):
    """A metric that is not finished: parts that add, and parts of which the largest counts."""

    def sums(self) -> list[Tensor]:
        """Parts that add up over ranks and micro-batches."""
        ...

    def maxima(self) -> list[Tensor]:
        """Parts of which the largest counts."""
        ...

    def finish(self, sums: list[float], maxima: list[float]) -> float:
        """The number, from the merged parts."""
        ...


@dataclass(frozen=True)
class Sum:
    """A total. Identity: 0."""

    total: Tensor

    def sums(self) -> list[Tensor]:
        """The total."""
        return [self.total]

    def maxima(self) -> list[Tensor]:
        """Nothing."""
        return []

    def finish(self, sums: list[float], maxima: list[float]) -> float:
        """The total."""
        return sums[0]


@dataclass(frozen=True)
class Mean:
    """A mean, as sum and count. Identity: 0 of 0, whose mean is NaN."""

    total: Tensor
    count: Tensor

    @classmethod
    def over(cls, values_T: Tensor, mask_T: Tensor) -> Mean:
        """Mean of the values under a mask; the mask is the population."""
        return cls(torch.where(mask_T, values_T.double(), 0.0).sum(), mask_T.sum())

    def sums(self) -> list[Tensor]:
        """Sum and count."""
        return [self.total, self.count]

    def maxima(self) -> list[Tensor]:
        """Nothing."""
        return []

    def finish(self, sums: list[float], maxima: list[float]) -> float:
        """Sum over count; NaN if there was nothing."""
        return sums[0] / sums[1] if sums[1] else float("nan")


@dataclass(frozen=True)
class Deviation:
    """A standard deviation (population), around a pivot near the mean so that nothing cancels."""

    pivot: float
    total: Tensor
    square: Tensor
    count: Tensor

    @classmethod
    def over(cls, values_T: Tensor, mask_T: Tensor, *, pivot: float) -> Deviation:
        """Deviation of the values under a mask."""
        centred_T = torch.where(mask_T, values_T.double() - pivot, 0.0)
        return cls(pivot, centred_T.sum(), centred_T.square().sum(), mask_T.sum())

    def sums(self) -> list[Tensor]:
        """Sum, squared sum and count, around the pivot."""
        return [self.total, self.square, self.count]

    def maxima(self) -> list[Tensor]:
        """Nothing."""
        return []

    def finish(self, sums: list[float], maxima: list[float]) -> float:
        """Root of the mean square minus the squared mean; NaN if there was nothing."""
        if not sums[2]:
            return float("nan")
        return max(0.0, sums[1] / sums[2] - (sums[0] / sums[2]) ** 2) ** 0.5


@dataclass(frozen=True)
class Maximum:
    """A maximum. Identity: -inf."""

    largest: Tensor

    @classmethod
    def over(cls, values_T: Tensor, mask_T: Tensor) -> Maximum:
        """Largest value under a mask."""
        kept = torch.where(mask_T, values_T.double(), -torch.inf)
        return cls(kept.max() if kept.numel() else kept.new_full((), -torch.inf))

    def sums(self) -> list[Tensor]:
        """Nothing."""
        return []

    def maxima(self) -> list[Tensor]:
        """The largest so far."""
        return [self.largest]

    def finish(self, sums: list[float], maxima: list[float]) -> float:
        """The largest."""
        return maxima[0]


@dataclass(frozen=True)
class Minimum:
    """A minimum. Identity: +inf."""

    smallest: Tensor

    @classmethod
    def over(cls, values_T: Tensor, mask_T: Tensor) -> Minimum:
        """Smallest value under a mask."""
        return cls(-Maximum.over(-values_T, mask_T).largest)

    def sums(self) -> list[Tensor]:
        """Nothing."""
        return []

    def maxima(self) -> list[Tensor]:
        """The negated smallest so far."""
        return [-self.smallest]

    def finish(self, sums: list[float], maxima: list[float]) -> float:
        """The smallest."""
        return -maxima[0]


def finish_metrics(micro_batches: list[Mapping[str, Value]], axis: Axis) -> dict[str, float]:
    """Merge metrics over micro-batches and over an axis, and finish them. Two collectives for all together.

    Args:
        micro_batches: the same keys in each, in the same order on every rank.
        axis: the ranks that hold different tokens (dp_cp). Ranks of tp hold the same and are not merged.
    """
    values = micro_batches[0]
    sums = torch.stack([torch.stack([part.double() for value in metrics.values() for part in value.sums()])
                        for metrics in micro_batches]).sum(0)
    maxima = [torch.stack([part.double() for value in metrics.values() for part in value.maxima()])
              for metrics in micro_batches if any(value.maxima() for value in metrics.values())]
    merged_sums = all_sum(sums, axis).tolist()
    merged_maxima = all_max(torch.stack(maxima).amax(0), axis).tolist() if maxima else []
    finished = {}
    for name, value in values.items():
        own_sums = [merged_sums.pop(0) for _ in value.sums()]
        own_maxima = [merged_maxima.pop(0) for _ in value.maxima()]
        finished[name] = value.finish(own_sums, own_maxima)
    return finished
