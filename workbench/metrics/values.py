"""Metrics as values that merge over micro-batches and ranks, in any order, also with empty ranks.

A mean of means is not a mean. Four tokens with ratios 1, 1, 1, 5 on two ranks as (1) and (1, 1, 5) average to
1.67 if each rank averages first; the mean is 2. So a mean travels as (sum, count), and a maximum of nothing is
minus infinity, not 0.

A `Reducer` defines how a number is computed from tokens, and a `Value` is its unfinished state. Every reducer has an
identity, the contribution of an empty rank. It is data of a metric's declaration (`workbench.metrics.definitions`), and
never derived from the metric's name.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.reproducible.rows import rows_in_order, sum_in_order
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis

NOTHING = float("nan")
"""The mean of no tokens."""

Power = tuple[int, float]
"""(exponent, pivot): the contribution of a token to a sum is weight * (value - pivot) ** exponent."""

COUNT: Power = (0, 0.0)
"""The power whose sum is the weight of the tokens themselves."""

ACCURACY = 0.01
"""Half the relative width of a bin of a `Quantile`."""
_GROWTH = math.log((1 + ACCURACY) / (1 - ACCURACY))


@dataclass(frozen=True)
class Reducer:
    """The reduction of a metric over tokens. Values of equal reducers can be merged.

    Attributes:
        powers: for each sum, the contribution of a token.
        signs: for each maximum: +1 for the value, -1 for the negated value.
        plain: powers and signs define it completely; many such metrics are reduced together.
    """

    plain: ClassVar[bool] = True
    powers: ClassVar[tuple[Power, ...]] = ()
    signs: ClassVar[tuple[int, ...]] = ()

    def over(self, values_T: Tensor, mask_T: Tensor, weights_T: Tensor | None = None) -> Value:
        """Return the unfinished value of the tokens under a mask, the population; weights of None are 1. [T] each."""
        values_T, weights_T = _masked(values_T, mask_T, weights_T)
        sums = tuple((weights_T * (values_T - pivot) ** exponent).sum() for exponent, pivot in self.powers)
        return Value(self, sums, tuple(_largest(sign * values_T, weights_T > 0) for sign in self.signs))

    def moved(self, sums: Sequence[Tensor], maxima: Sequence[Tensor], to: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rescale sums relative to ``maxima`` to the merged maxima ``to``. By default: unchanged."""
        return sums

    def finish(self, sums: Sequence[Any], maxima: Sequence[Any]) -> float:
        """Return the number, from the merged parts: tensors (float64, on the CPU), or numbers for scalars."""
        return self._number(*map(float, (*sums, *maxima)))

    def _number(self, *parts: Any, **_: Any) -> float:  # typed as any signature: a reducer names its own parts
        return parts[0]

    def __str__(self) -> str:
        return type(self).__name__.lower()


@dataclass(frozen=True)
class Value:
    """The unfinished value of a metric: parts that are summed, and parts of which the maximum is taken. float64."""

    reducer: Reducer
    sums: tuple[Tensor, ...]
    maxima: tuple[Tensor, ...]

    def merge(self, other: Value) -> Value:
        """Merge two values, associative and commutative; SpecError for values of two different reducers."""
        if other.reducer != self.reducer:
            raise SpecError(
                f"merge {self.reducer!r} with {other.reducer!r}",
                rule="values of one reducer merge",
                fix="give the metric one declaration on all ranks and micro-batches",
            )
        maxima = tuple(torch.maximum(a, b) for a, b in zip(self.maxima, other.maxima, strict=True))
        own, others = (v.reducer.moved(v.sums, v.maxima, maxima) for v in (self, other))
        return Value(self.reducer, tuple(a + b for a, b in zip(own, others, strict=True)), maxima)

    def finish(self) -> float:
        """Return the number of one rank and one micro-batch; otherwise use `finish_metrics`."""
        return self.reducer.finish([part.cpu() for part in self.sums], [part.cpu() for part in self.maxima])


@dataclass(frozen=True)
class Sum(Reducer):
    """A total. Identity: 0."""

    powers = ((1, 0.0),)


@dataclass(frozen=True)
class SquaredSum(Reducer):
    """A total of squares. Identity: 0."""

    powers = ((2, 0.0),)


@dataclass(frozen=True)
class Count(Reducer):
    """An integer count, as the total of shares that sum to 1 per item: 1 / length on each token of a document."""

    powers = (COUNT,)

    def _number(self, total: float) -> float:
        return float(round(total))  # the shares have rounding errors


@dataclass(frozen=True)
class Mean(Reducer):
    """A mean, as weighted total and weight. Identity: 0 of 0, whose mean is NaN.

    An epsilon is added to the weight, or it is at least a number, as in some systems; the mean of no tokens is then 0.
    """

    epsilon: float = 0.0
    least: float = 0.0
    powers = ((1, 0.0), COUNT)

    def _number(self, total: float, weight: float) -> float:
        weight = max(weight + self.epsilon, self.least)
        return total / weight if weight else NOTHING


@dataclass(frozen=True)
class Share(Reducer):
    """A total divided by a number that the whole step knows. Identity: 0.

    For example ``of`` all documents of the step, including those without trained tokens, plus an epsilon.
    """

    of: float
    epsilon: float = 0.0
    powers = ((1, 0.0),)

    def _number(self, total: float) -> float:
        return total / (self.of + self.epsilon) if self.of + self.epsilon else NOTHING


@dataclass(frozen=True)
class Deviation(Reducer):
    """A standard deviation (population), around a pivot near the mean so that nothing cancels; NaN of no tokens.

    The pivot is the same on every rank.
    """

    pivot: float = 0.0

    @property
    def powers(self) -> tuple[Power, ...]:  # type: ignore[override]
        """Sum, squared sum and weight, around the pivot."""
        return (1, self.pivot), (2, self.pivot), COUNT

    def _number(self, total: float, square: float, weight: float) -> float:
        if not weight:
            return NOTHING
        variance = square / weight - (total / weight) ** 2
        return math.sqrt(variance) if variance > 0 else variance * 0.0  # NaN stays


@dataclass(frozen=True)
class EffectiveSampleSize(Reducer):
    """The number of equal weights with the same information: (sum w)^2 / sum w^2. Identity: 0, 0; then NaN.

    Source: Kish (1965), Survey Sampling.
    """

    powers = ((1, 0.0), (2, 0.0))

    def _number(self, total: float, square: float) -> float:
        return total**2 / square if square else NOTHING

    def __str__(self) -> str:
        return "(sum)^2 / sum of squares"


@dataclass(frozen=True)
class Maximum(Reducer):
    """A maximum. Identity: -inf."""

    signs = (1,)


@dataclass(frozen=True)
class Minimum(Reducer):
    """A minimum. Identity: +inf."""

    signs = (-1,)

    def _number(self, largest_negated: float) -> float:
        return -largest_negated


@dataclass(frozen=True)
class LogMeanExp(Reducer):
    """Log of the mean of exp(value), without overflow of exp. Identity: -inf and 0 of 0, which finishes as NaN.

    Merged as the maximum m, sum exp(value - m), and the weight; sums are rescaled to a common m before they are added.
    """

    plain = False
    signs = (1,)

    def over(self, values_T: Tensor, mask_T: Tensor, weights_T: Tensor | None = None) -> Value:
        """See `Reducer.over`."""
        values_T, weights_T = _masked(values_T, mask_T, weights_T)
        largest = _largest(values_T, weights_T > 0)
        shifted_T = torch.where(weights_T > 0, values_T - _finite(largest), -torch.inf)
        return Value(self, ((weights_T * shifted_T.exp()).sum(), weights_T.sum()), (largest,))

    def moved(self, sums: Sequence[Tensor], maxima: Sequence[Tensor], to: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rescale to the merged maximum; an empty side stays 0 (not exp(-inf + inf))."""
        return sums[0] * (_finite(maxima[0]) - _finite(to[0])).clamp_max(0).exp(), sums[1]

    def _number(self, total: float, weight: float, largest: float) -> float:
        if math.isnan(total) or not weight:
            return NOTHING
        return largest if math.isinf(largest) else largest + math.log(total) - math.log(weight)

    def __str__(self) -> str:
        return "log mean exp"


@dataclass(frozen=True)
class Quantile(Reducer):
    """The quantile q (0 to 1) of positive values, from counts in logarithmic bins. Identity: counts of 0; then NaN.

    The relative error is at most `ACCURACY` between 1e-6 and 1e6; values outside are counted in the edge bins.

    Source: Masson, Rim, Lee, "DDSketch", arXiv 1908.10693.
    """

    q: float
    plain = False

    def over(self, values_T: Tensor, mask_T: Tensor, weights_T: Tensor | None = None) -> Value:
        """See `Reducer.over`."""
        values_T, weights_T = _masked(values_T, mask_T, weights_T)
        last = math.ceil(2 * math.log(1e6) / _GROWTH)
        place_T = ((values_T.nan_to_num(0).clamp(1e-6, 1e6).log() - math.log(1e-6)) / _GROWTH).ceil()
        counts = values_T.new_zeros(last + 1).index_add(0, place_T.long().clamp(0, last), weights_T)
        return Value(self, (counts + torch.where(values_T.isnan(), values_T, 0.0).sum(),), ())  # NaN propagates

    def finish(self, sums: Sequence[Tensor], maxima: Sequence[Tensor]) -> float:
        """The middle of the quantile's bin; NaN if there are no tokens."""
        running = sums[0].cumsum(0)
        if not float(running[-1]) > 0:
            return NOTHING
        place = int(torch.searchsorted(running, self.q * running[-1] * (1 - 1e-12)))
        upper = math.exp(math.log(1e-6) + place * _GROWTH)
        return upper * (1 - ACCURACY)

    def __str__(self) -> str:
        return f"quantile {self.q:g}"


def finish_metrics(micro_batches: Sequence[Mapping[str, Value]], axis: Axis) -> dict[str, float]:
    """Merge metrics over micro-batches and over an axis, and finish them. At most two collectives in total.

    Every micro-batch has the same keys, in the same order on every rank. The axis has the ranks with different tokens
    (dp_cp); ranks of tp have the same ones and are not merged.

    Raises:
        SpecError: micro-batches with different metrics.
    """
    return _finished(
        micro_batches, lambda lines_BK: all_max(lines_BK.amax(0), axis), lambda lines_BK: all_sum(lines_BK.sum(0), axis)
    )


def finish_in_order(rows: Sequence[Mapping[str, Value]], numbers_r: Tensor, axis: Axis) -> dict[str, float]:
    """Finish the metrics of whole rows, with sums that are bitwise independent of the assignment of rows to ranks.

    ``numbers_r`` [r] are the rows' numbers in the step, see `workbench.reproducible.rows.sum_in_order`; the axis is dp.
    """
    return _finished(
        rows,
        lambda lines_rK: rows_in_order(lines_rK, numbers_r, axis).amax(0),
        lambda lines_rK: sum_in_order(lines_rK, numbers_r, axis),
    )


def _finished(
    micro_batches: Sequence[Mapping[str, Value]],
    largest_of: Callable[[Tensor], Tensor],
    total_of: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Finish micro-batches, given the reductions of their packed parts [B, K], over all ranks, to one line [K]."""
    first = micro_batches[0]
    for metrics in micro_batches[1:]:
        differing = sorted(first.keys() ^ metrics.keys()) or [
            key for key in first if metrics[key].reducer != first[key].reducer
        ]
        if differing:
            raise SpecError(
                "finish metrics",
                found=f"{', '.join(differing)} not equal in every micro-batch",
                rule="every micro-batch and rank has the same metrics, tokens or not",
                fix="select metrics by the spec, not by the data of a micro-batch",
            )
    largest = _reduced([[v.maxima for v in metrics.values()] for metrics in micro_batches], largest_of)
    # A sum that is relative to a maximum needs the merged maximum, so maxima come first.
    merged = _unpacked(largest, {key: value.maxima for key, value in first.items()})
    total = _reduced(
        [[v.reducer.moved(v.sums, v.maxima, merged[key]) for key, v in metrics.items()] for metrics in micro_batches],
        total_of,
    )
    sums = _read(total, {key: value.sums for key, value in first.items()})
    maxima = _read(largest, {key: value.maxima for key, value in first.items()})
    return {key: value.reducer.finish(sums[key], maxima[key]) for key, value in first.items()}


def _reduced(rows: list[list[Sequence[Tensor]]], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Pack all parts of each micro-batch into one line, and reduce the lines to one; without parts, to an empty one."""
    lines = [[part.reshape(-1) for parts in row for part in parts] for row in rows]
    return reduce(torch.stack([torch.cat(line) for line in lines])) if lines[0] else torch.zeros(0)


def _unpacked(packed: Tensor, like: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Tensor]]:
    """Split one line into the parts of each metric; views, no copies."""
    pieces = iter(packed.split([part.numel() for parts in like.values() for part in parts]))
    return {key: [next(pieces).view(part.shape) for part in parts] for key, parts in like.items()}


def _read(packed: Tensor, like: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Any]]:
    """As `_unpacked`, on the CPU; a part without dimensions is a number."""
    packed = packed.cpu()
    starts = itertools.accumulate((part.numel() for parts in like.values() for part in parts), initial=0)
    places = {key: [(next(starts), part.shape) for part in parts] for key, parts in like.items()}
    numbers = iter(packed[[start for parts in places.values() for start, shape in parts if not shape]].tolist())
    return {
        key: [packed[start : start + shape.numel()].view(shape) if shape else next(numbers) for start, shape in parts]
        for key, parts in places.items()
    }


def _masked(values_T: Tensor, mask_T: Tensor, weights_T: Tensor | None) -> tuple[Tensor, Tensor]:
    weights_T = mask_T.double() if weights_T is None else torch.where(mask_T, weights_T.double(), 0.0)
    return torch.where(mask_T, values_T.double(), 0.0), weights_T


def _largest(values_T: Tensor, mask_T: Tensor) -> Tensor:
    masked_T = torch.where(mask_T, values_T, -torch.inf)
    return masked_T.amax() if masked_T.numel() else masked_T.new_full((), -torch.inf)


def _finite(largest: Tensor) -> Tensor:
    return torch.where(torch.isfinite(largest), largest, 0.0)
