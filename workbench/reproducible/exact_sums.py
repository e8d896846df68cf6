"""Sums that no order changes: integers in multiples of a power of two.

A partial gradient is rounded once, to a multiple of 2^-bits, and from then on only integers are added: over blocks,
micro-batches and ranks, in whatever order and by whatever algorithm. Whether they fit is decided from the largest
partial and from how many there are, both of which every layout knows alike.

Letters: P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from workbench.reproducible.resolution import OutOfRange
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis

ROOM = 62
"""Bits of an integer that are used."""
LEAST = 16
"""Bits that the largest partial gradient of a parameter has at least; what is added up of many has more."""
COMFORT = 4
"""Bits beyond `LEAST`, or below the largest that fit, that are asked for when a step is computed again."""


@dataclass
class Leaves:
    """How many partial gradients may be added to one element: of the step, or to a parameter for each.

    Attributes:
        tokens: one for each token of a document; to a parameter: how many for each.
        blocks: the same for blocks that hold such tokens.
    """

    tokens: int = 0
    blocks: int = 0


class Accumulator:
    """The exact sum of one parameter's partial gradients.

    Args:
        shape: of the parameter as this rank computes with it.
        device: where.
        per: partials of each element for each token and block of the step, over all tp ranks.
    """

    def __init__(self, shape: torch.Size, device: torch.device, per: Leaves) -> None:
        self.shape, self.device, self.per = shape, device, per
        self.peak = torch.zeros((), device=device)
        self.scale = 1.0
        self.rows: Tensor | None = None
        self._total: Tensor | None = None
        self._kept: list[tuple[ModuleType, Tensor, Tensor]] = []

    def start(self, bits: int) -> None:
        """Empty, for a step that is summed in multiples of 2^-bits."""
        self._total, self.rows, self.scale, self._kept = None, None, 2.0**bits, []
        self.peak.zero_()

    @property
    def total(self) -> Tensor:
        """The integers; they exist from the first partial on."""
        if self._total is None:
            self._total = torch.zeros(self.shape, dtype=torch.int64, device=self.device)
        while self._kept:
            kernels, rows_TD, index_T = self._kept.pop()
            kernels.add_rows(self._total, self.peak, self.scale, rows_TD, index_T)
        return self._total

    def add_at(self, kernels: ModuleType, rows_TD: Tensor, index_T: Tensor) -> None:
        """Add a partial to each named row; later, as long as these take less memory than the integers of all would.

        Args:
            kernels: what adds them.
            rows_TD: the partials.
            index_T: which row of the parameter; negative: none.
        """
        self._kept.append((kernels, rows_TD, index_T))
        waiting = sum(rows.numel() * rows.element_size() for _, rows, _ in self._kept)
        if self._total is not None or 2 * waiting > 8 * self.shape.numel():
            self.settle()

    def release(self) -> None:
        """Let go of the integers."""
        self._total = None

    def settle(self) -> None:
        """Add what waits to be added, so that the peak knows of it."""
        if self._kept:
            self._total = self.total

    def flush(self, own_rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum what came so far over ranks, and keep this rank's rows only; collective. For sharded parameters.

        Args:
            own_rows: the sum over ranks of integers, of which it returns this rank's rows.

        Returns:
            This rank's rows of everything that was summed in this step.
        """
        self.settle()
        if self.rows is None or self._total is not None:
            rows = own_rows(self.total)
            self.rows, self._total = rows if self.rows is None else self.rows.add_(rows), None
        return self.rows


def check_range(
    accumulators: Sequence[Accumulator], names: Sequence[str], leaves: Leaves, bits: int, axes: Sequence[Axis]
) -> list[int]:
    """Hold the partials of a step to what integers hold. Collective: maxima over all axes, sums over the first.

    Args:
        accumulators: of every parameter.
        names: theirs.
        leaves: tokens and blocks that this rank computed.
        bits: gradients are multiples of 2^-bits.
        axes: dp_cp and tp.

    Returns:
        How many bits the largest partial of each parameter has; 0 where all are zero.

    Raises:
        OutOfRange: they are too large, too small or not finite; alike on every rank.
    """
    device = accumulators[0].device
    for one in accumulators:
        one.settle()
    # A maximum over ranks may drop NaN, and does not drop infinity.
    peaks_P = torch.stack([one.peak for one in accumulators]).nan_to_num(nan=torch.inf, posinf=torch.inf)
    for axis in axes:
        peaks_P = all_max(peaks_P, axis)
    tokens, blocks = all_sum(torch.tensor([leaves.tokens, leaves.blocks], device=device), axes[0]).tolist()
    peaks = peaks_P.tolist()
    if infinite := [name for name, peak in zip(names, peaks, strict=True) if peak == math.inf]:
        raise OutOfRange.because(f"a gradient of {_some(infinite)} that is not finite", None)
    fits, used = {}, {}
    for name, one, peak in zip(names, accumulators, peaks, strict=True):
        exponent = math.frexp(peak)[1]
        added = one.per.tokens * tokens + one.per.blocks * blocks
        if peak:
            fits[name], used[name] = ROOM - exponent - max(added, 1).bit_length(), exponent + bits
    most = min(fits.values(), default=bits)
    if most < bits:
        tight = [name for name, fit in fits.items() if fit < bits]
        raise OutOfRange.because(
            f"partial gradients of {_some(tight)} up to {max(peaks):.3g}: more than fit with "
            f"{bits} bits after the point",
            most - COMFORT,
        )
    lowest = min(used.values(), default=LEAST)
    wanted = min(bits + LEAST + COMFORT - lowest, most)
    if lowest < LEAST and wanted > bits:
        coarse = [name for name, count in used.items() if count < LEAST]
        raise OutOfRange.because(
            f"partial gradients of {_some(coarse)} that use {lowest} bits of {bits} after the "
            f"point: fewer than {LEAST}",
            wanted,
        )
    return [used.get(name, 0) for name in names]


def exact_sum(values: Tensor, *axes: Axis) -> float:
    """Sum of all elements on all ranks, the same bits however they are dealt and ordered.

    Each is rounded to a multiple of a power of two that the largest size and the number of elements decide; a sum of
    n is off by at most n 2^(log2(n) - 61) of the largest.

    Args:
        values: of any shape; float32 or wider.
        axes: over which ranks hold different elements.

    Returns:
        NaN if any is not finite.
    """

    def total(one: Tensor, scale: Tensor) -> Tensor:
        return one.double().mul(scale).round_().to(torch.int64).sum()

    return _in_integers([values], [_largest(values)], total, axes)[0]


def exact_square_sums(values: Sequence[Tensor], kernels: ModuleType, *axes: Axis) -> list[float]:
    """`exact_sum` of the squares of each of several tensors of at most float32, which float64 holds exactly.

    Three collectives an axis.
    """
    peaks = [kernels.largest(one).double().square() for one in values]
    return _in_integers(values, peaks, kernels.sum_of_squares, axes)


def _in_integers(
    values: Sequence[Tensor], largest: Sequence[Tensor], total: Callable[[Tensor, Tensor], Tensor], axes: Sequence[Axis]
) -> list[float]:
    device = values[0].device
    peaks_P = torch.stack(list(largest)).nan_to_num(nan=torch.inf, posinf=torch.inf)
    counts_P = torch.tensor([one.numel() for one in values], device=device)
    for axis in axes:
        peaks_P, counts_P = all_max(peaks_P, axis), all_sum(counts_P, axis)
    peaks = peaks_P.tolist()
    bits = [
        min(ROOM - math.frexp(peak)[1] - count.bit_length(), 1000) if 0 < peak < math.inf else 0
        for peak, count in zip(peaks, counts_P.tolist(), strict=True)
    ]
    scales_P = torch.tensor([2.0**shift for shift in bits], dtype=torch.float64).to(device)
    totals_P = torch.stack([total(one, scale) for one, scale in zip(values, scales_P.unbind(), strict=True)])
    for axis in axes:
        totals_P = all_sum(totals_P, axis)
    return [
        math.ldexp(float(summed), -shift) if peak < math.inf else math.nan
        for summed, shift, peak in zip(totals_P.tolist(), bits, peaks, strict=True)
    ]


def _largest(values: Tensor) -> Tensor:
    return values.abs().amax().double() if values.numel() else values.new_zeros((), dtype=torch.float64)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
