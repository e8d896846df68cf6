"""Metrics of one document, from its number of tokens and sums over them.

Letters: N documents of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from workbench.metrics.definitions import DocumentMetric, statistic
from workbench.metrics.quantities import Advantage, ClipRule, LogRatio, beyond


def per_document(
    key: str, meaning: str, make: Callable[..., Tensor], reduce: str, of: float | None = None
) -> DocumentMetric:
    """Return the metric of a statistic of a function of each document's log ratio (policy / old) and advantage."""
    return DocumentMetric(
        key, meaning, "1", (LogRatio("policy", "old"), Advantage()), functools.partial(reduced, make, reduce, of)
    )


def token_share(key: str, region: str, clip: ClipRule, meaning: str) -> DocumentMetric:
    """Return the metric of the share of tokens whose document's ratio lies in a region of the clip."""
    return DocumentMetric(
        key,
        f"{meaning}, by the document's ratio",
        "1",
        (LogRatio("policy", "old"), Advantage()),
        functools.partial(token_mean, functools.partial(outside_clip_of, region, clip), epsilon=0.0),
        weight="its trained tokens",
    )


def reduced(make: Callable[..., Tensor], reduce: str, of: float | None, tokens_N: Tensor, *sums_N: Tensor) -> float:
    """Return a statistic of a function of each document; a mean may count more documents than have tokens."""
    values_N = make(tokens_N, *sums_N)
    if reduce == "mean" and of is not None:
        return float(values_N.sum()) / of if of else math.nan
    return statistic(reduce, values_N)


def token_mean(
    make: Callable[..., Tensor], tokens_N: Tensor, *sums_N: Tensor, epsilon: float = 1e-8, of: float | None = None
) -> float:
    """Return the mean over tokens, or over ``of`` tokens, of a function of their document."""
    weight = (float(tokens_N.sum()) if of is None else of) + epsilon
    return float((tokens_N * make(tokens_N, *sums_N)).sum()) / weight if weight else math.nan


def ratio_of(tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return the geometric mean of a document's ratios; epsilon is added to its length."""
    return (log_ratio_N / (tokens_N + epsilon)).exp()


def clamped_of(clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor, epsilon: float = 0.0) -> Tensor:
    """Return the same, clamped to a clip."""
    return ratio_of(tokens_N, log_ratio_N, epsilon=epsilon).clamp(clip.lower, clip.upper)


def k3_of(tokens_N: Tensor, log_ratio_N: Tensor, *_: Tensor) -> Tensor:
    """Return the document's r - 1 - log r."""
    mean_N = log_ratio_N / tokens_N
    return torch.expm1(mean_N) - mean_N


def outside_clip_of(region: str, clip: ClipRule, tokens_N: Tensor, log_ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """Return 1 where the document's ratio lies in a region of the clip, by the sign of its mean advantage."""
    return beyond(region, ratio_of(tokens_N, log_ratio_N), advantage_N / tokens_N, clip).double()
