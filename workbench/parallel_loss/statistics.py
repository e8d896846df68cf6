"""Batch statistics over all ranks: KL and advantages.

Letters: t tokens of this rank, in any shape | N documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.sharding.collectives import all_max, all_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class KlStatistics:
    """KL estimates between two policies over the counted tokens of all ranks. The same numbers on every rank.

    Attributes:
        token_mean: mean of the estimate over tokens; may be part of a loss.
        document_mean: mean over documents of the sum of the estimate over their tokens; may be part of a loss.
        largest: the largest estimate of a token; minus infinity if none counts. Data.
        tokens: number of tokens that count. Data.
        documents: number of documents with a token that counts. Data.
    """

    token_mean: Tensor
    document_mean: Tensor
    largest: Tensor
    tokens: Tensor
    documents: Tensor


@dataclass(frozen=True)
class AdvantageStatistics:
    """Mean and spread of advantages over all ranks. Data, the same on every rank.

    Attributes:
        mean: 0 if nothing counts.
        std: of the population or of a sample, as requested; 0 if nothing counts.
        count: number of advantages.
    """

    mean: Tensor
    std: Tensor
    count: Tensor


def mean_and_std(values: Tensor, mask: Tensor, axes: tuple[Axis, ...], *, correction: int) -> AdvantageStatistics:
    """Mean and standard deviation over ranks, in two passes and float64: two collectives an axis.

    Formula:  mean = sum_t x_t / n;   std = sqrt(sum_t (x_t - mean)^2 / max(n - correction, 1))
    Backward: none.
    """
    masked = torch.where(mask, values.detach(), 0.0).double()
    total, count = summed(torch.stack([masked.sum(), mask.sum().double()]), axes)
    mean = total / count.clamp_min(1)
    squares = torch.where(mask, (masked - mean).square(), 0.0).sum()
    std = (summed(squares, axes) / (count - correction).clamp_min(1)).sqrt()
    dtype = torch.promote_types(values.dtype, torch.float32)
    return AdvantageStatistics(mean.to(dtype), std.to(dtype), count.long())


def summed(value: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """Sum over several axes, outside autograd."""
    for axis in axes:
        value = all_sum(value, axis)
    return value


def largest(values: Tensor, mask: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """Maximum of the counted values on all ranks; minus infinity, the identity of a maximum, if nothing counts."""
    masked = torch.where(mask, values.detach(), -torch.inf).reshape(-1)
    maximum = masked.max() if len(masked) else masked.new_tensor(-torch.inf)
    for axis in axes:
        maximum = all_max(maximum, axis)
    return maximum
