"""Order-independent sums: integers in multiples of a power of two.

A partial gradient is rounded once, to a multiple of 2^-bits, and from then on only integers are added: over blocks,
micro-batches and ranks, in any order and by any algorithm. The range check uses the largest partial and their number,
which are the same in every layout.

Letters: P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import SpecError, WorkbenchError
from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis

if TYPE_CHECKING:
    from workbench.reproducible.parts import Bucket


@dataclass(frozen=True)
class Resolution:
    """Canonical pieces of a step, and resolution of its sums; runs with equal settings have equal bits.

    Attributes:
        block_tokens: tokens of a row that are computed together.
        weight_chunks: pieces that a weight is computed in, a power of two: the largest tp to compare with.
        bits: gradients are summed in multiples of 2^-bits.

    Raises:
        SpecError: a number of pieces that is not a power of two, or a block without tokens.
    """

    block_tokens: int
    weight_chunks: int = 1
    bits: int = 32

    def __post_init__(self) -> None:
        chunks = self.weight_chunks
        if self.block_tokens < 1 or chunks < 1 or chunks & (chunks - 1):
            raise SpecError(
                f"block_tokens = {self.block_tokens}, weight_chunks = {chunks}",
                rule="at least one token per block; the number of pieces of a weight is a power of two, because they "
                "are added in pairs",
                fix="choose block_tokens such as 128, and weight_chunks among 1, 2, 4, 8",
            )


class OutOfRange(WorkbenchError, ArithmeticError):
    """Gradients that the integers of this step cannot hold; raised alike on every rank of every layout.

    Attributes:
        bits: sufficient bits, to recompute the step with. None: the gradients are not finite.
    """

    bits: int | None = None

    @classmethod
    def because(cls, found: str, bits: int | None) -> OutOfRange:
        """Build the error from what was found, and the number of bits that the step needs."""
        fix = (
            "look for the cause: a learning rate, a ratio without a clip"
            if bits is None
            else f"compute the step again after exact.start(bits={bits})"
        )
        error = cls(
            "exact sums of gradients",
            found=found,
            rule="the largest partial gradient fits into 62 bits with all that is added to it, and uses enough of them",
            fix=fix,
        )
        error.bits = bits
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild the error from its two arguments."""
        return type(self).because, (self.parts["found"], self.bits)


USABLE_BITS = 62
"""Bits of an integer that are used."""
MINIMUM_BITS = 16
"""Minimum bits of the largest partial gradient of a parameter; a sum of many partials has more."""
MARGIN = 4
"""Margin of bits, beyond `LEAST` or below the most that fit, when a step is recomputed."""


@dataclass
class Leaves:
    """Partial gradients added to one element: tokens of documents and blocks of a step, or per token and per block."""

    tokens: int = 0
    blocks: int = 0


class Accumulator:
    """Exact sum of the partial gradients of one parameter, of which this rank computes with ``shape``.

    ``per``: partials of each element per token and block of the step, over all tp ranks. ``bucket`` has the integers of
    a weight; None: this accumulator has its own.
    """

    def __init__(self, shape: torch.Size, device: torch.device, per: Leaves) -> None:
        self.shape, self.device, self.per = shape, device, per
        self.peak = torch.zeros((), device=device)
        self.scale = 1.0
        self.bucket: Bucket | None = None
        self.rows: Tensor | None = None
        self._total: Tensor | None = None
        self._pending: list[tuple[ModuleType, Tensor, Tensor]] = []

    def start(self, bits: int) -> None:
        """Reset for a step that is summed in multiples of 2^-bits."""
        self._total, self.rows, self.scale, self._pending = None, None, 2.0**bits, []
        self.peak.zero_()
        if self.bucket is not None:
            self.bucket.start()

    @property
    def total(self) -> Tensor:
        """The integers; allocated at the first partial."""
        if self._total is None and self.bucket is not None:
            self._total = self.bucket.integers(self)
        elif self._total is None:
            self._total = torch.zeros(self.shape, dtype=torch.int64, device=self.device)
        while self._pending:
            kernels, rows_TD, index_T = self._pending.pop()
            kernels.add_rows(self._total, self.peak, self.scale, rows_TD, index_T)
        return self._total

    def added(self) -> None:
        """Note that a backward has added all of its partials."""
        if self.bucket is not None:
            self.bucket.added(self)

    def add_at(self, kernels: ModuleType, rows_TD: Tensor, index_T: Tensor) -> None:
        """Add a partial to each indexed row (negative: none); deferred while they take less memory than integers."""
        self._pending.append((kernels, rows_TD, index_T))
        pending_bytes = sum(rows.numel() * rows.element_size() for _, rows, _ in self._pending)
        if self._total is not None or 2 * pending_bytes > 8 * self.shape.numel():
            self.settle()

    def release(self) -> None:
        """Free the integers."""
        self._total = None

    def settle(self) -> None:
        """Add the deferred partials, so that the peak includes them."""
        if self._pending:
            self._total = self.total

    def flush(self, own_rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Reduce the sum so far over ranks, and keep and return this rank's rows only. For sharded parameters.

        ``own_rows``, collective, sums integers over ranks and returns this rank's rows.
        """
        self.settle()
        if self.rows is None or self._total is not None:
            rows = own_rows(self.total)
            self.rows, self._total = rows if self.rows is None else self.rows.add_(rows), None
        return self.rows


def check_range(
    accumulators: Sequence[Accumulator], names: Sequence[str], leaves: Leaves, bits: int, axes: Sequence[Axis]
) -> list[int]:
    """Return the bits of the largest partial of each parameter in a step, 0 if all are zero, if the integers hold them.

    Collective: maxima over all axes (dp_cp and tp), sums over the first. ``leaves`` are those of this rank.

    Raises:
        OutOfRange: they are too large, too small or not finite; alike on every rank.
    """
    device = accumulators[0].device
    for one in accumulators:
        one.settle()
    # A maximum over ranks may drop NaN, but not infinity.
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
            fits[name], used[name] = USABLE_BITS - exponent - max(added, 1).bit_length(), exponent + bits
    most = min(fits.values(), default=bits)
    if most < bits:
        tight = [name for name, fit in fits.items() if fit < bits]
        excess = f"up to {max(peaks):.3g}: more than fit with {bits} bits after the point"
        raise OutOfRange.because(f"partial gradients of {_some(tight)} {excess}", most - MARGIN)
    lowest = min(used.values(), default=MINIMUM_BITS)
    enough = min(bits + MINIMUM_BITS + MARGIN - lowest, most)
    if lowest < MINIMUM_BITS and enough > bits:
        coarse = [name for name, count in used.items() if count < MINIMUM_BITS]
        lack = f"that use {lowest} bits of {bits} after the point: fewer than {MINIMUM_BITS}"
        raise OutOfRange.because(f"partial gradients of {_some(coarse)} {lack}", enough)
    return [used.get(name, 0) for name in names]


def exact_sum(values: Tensor, *axes: Axis) -> float:
    """Sum of all elements on all ranks, bitwise independent of their order and distribution.

    Each, float32 or wider, is rounded to a multiple of a power of two that depends on the largest magnitude and the
    number of elements; a sum of n is off by at most n 2^(log2(n) - 61) of the largest. NaN if any element is not
    finite. The ranks of the axes hold different elements.
    """

    def total(one: Tensor, scale: Tensor) -> Tensor:
        return one.double().mul(scale).round_().to(torch.int64).sum()

    return _in_integers([values], [_largest(values)], total, axes)[0]


def exact_square_sums(values: Sequence[Tensor], kernels: ModuleType, *axes: Axis) -> list[float]:
    """`exact_sum` of the squares of each of several tensors of at most float32, whose squares float64 holds exactly.

    Three collectives per axis.
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
    bits = [  # at most 1000: float64 ends at 2^1023
        min(USABLE_BITS - math.frexp(peak)[1] - count.bit_length(), 1000) if 0 < peak < math.inf else 0
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
