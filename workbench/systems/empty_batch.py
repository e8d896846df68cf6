"""Means over nothing: 0 / 0, and its gradient in a system that divides without a guard.

If no token counts, weights of the workbench are 0, and so are loss and gradient. A system that divides a sum by its
count has a NaN loss. Its gradient is NaN, too, wherever the path from the loss to the token is open, because the
cotangent, mask / 0, is 0 * inf; where a clamp, a minimum or a maximum cuts the path, it is 0.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.losses.auxiliary import value_loss
from workbench.losses.clipped import clip_ratio


def undefined() -> Tensor:
    """Return [] NaN in float64: a loss that is a mean over nothing."""
    return torch.full((), math.nan, dtype=torch.float64)


def _where_open(open_T: Tensor) -> Tensor:
    return torch.where(open_T, math.nan, torch.zeros(open_T.shape, dtype=torch.float64))


def clipped_mean_gradient(
    policy_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    log_clamp: float,
) -> Tensor:
    """[T] gradient of a mean over no token of the clipped surrogate: 0 where the clip or the clamp cuts, else NaN.

    Values are those of all tokens, in nats, and the clip that of `clip_ratio`, of a log ratio within ``log_clamp``.
    """
    log_ratio_T = policy_T.detach() - old_T
    clamped_T = log_ratio_T.clamp(-log_clamp, log_clamp)
    cut_T = clip_ratio(clamped_T, advantages_T, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip).clipped_T
    assert cut_T is not None, "a clipped surrogate reports its cut tokens"
    return _where_open(~cut_T & (clamped_T == log_ratio_T))


def sequence_mean_gradient(advantages_T: Tensor, document_ids_T: Tensor, clip_low: float) -> Tensor:
    """[T] gradient of a mean over no row of a clipped ratio of rows, which is 0 in a row where nothing counts.

    A ratio of 0 is below the clip: a negative advantage cuts its token. The whole row is NaN if one of its advantages
    is not negative, or nothing is below the clip, whose length below 1 is ``clip_low``.
    """
    open_T = (advantages_T >= 0) | (clip_low >= 1)
    rows = int(document_ids_T.max()) + 1
    open_N = torch.zeros(rows, dtype=torch.float64).index_add(0, document_ids_T, open_T.double())
    return _where_open(open_N[document_ids_T] > 0)


def value_mean_gradient(values_T: Tensor, returns_T: Tensor, old_values_T: Tensor | None, clip: float | None) -> Tensor:
    """[T] gradient of a mean over no token of a critic's error: 0 where the clip cuts, else NaN."""
    all_T = torch.ones_like(values_T, dtype=torch.bool)
    cut_T = value_loss(values_T.detach(), returns_T, all_T, old_values_T=old_values_T, clip=clip).clipped_T
    return _where_open(all_T if cut_T is None else ~cut_T)
