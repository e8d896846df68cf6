"""Floating-point sums in a layout-independent order: by halves of a width, by pairs of pieces.

Letters: C pieces of a weight that this rank holds | D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.sharding.collectives import gather_equal
from workbench.sharding.mesh import Axis


def sum_by_pairs(pieces: Sequence[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums, until one is left; the number of pieces is a power of two."""
    pieces = list(pieces)
    while len(pieces) > 1:
        pieces = [left + right for left, right in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def sum_over_pieces(pieces: Sequence[Tensor], axis: Axis) -> Tensor:
    """`sum_by_pairs` over the pieces of all tp ranks, in rank order: each rank sums the lower levels of the tree.

    Layout: tp: sharded(pieces) in, replicated out. One all-gather.
    """
    return sum_by_pairs(gather_equal(sum_by_pairs(pieces), axis).unbind())


def mean_by_halves(values_D: Tensor) -> Tensor:
    """Mean over the last dimension, kept with size 1: elementwise sums of halves, so rows are independent."""
    count = width = values_D.shape[-1]
    while count > 1:
        half, odd = divmod(count, 2)
        rest = values_D[..., 2 * half : count]
        values_D = values_D[..., :half] + values_D[..., half : 2 * half]
        values_D, count = (torch.cat([values_D, rest], -1) if odd else values_D), half + odd
    return values_D / width
