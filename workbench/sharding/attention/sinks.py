"""Attention sinks: a learned score of each head that takes a share of every query's probability, and has no value.

The output without sinks and its log-normaliser give that with them, so kernels know nothing of sinks. In backward a
kernel gets the output with sinks, and a gradient that is scaled as the probabilities of the keys are.

Formula:  out' = keep * out, keep = exp(lse) / (exp(lse) + exp(sink))
Source:   gpt-oss, arXiv 2508.10925, section 2.3; as a softmax with one more logit in `transformers`.

Letters: H query heads | t tokens | d head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import ShardingError


def check_sinks(sinks_H: Tensor, query: Tensor) -> None:
    """Raise unless there is one sink for each query head of this rank."""
    if sinks_H.shape != (query.shape[1],):
        raise ShardingError(
            "attention with sinks",
            found=f"sinks {list(sinks_H.shape)}, and {query.shape[1]} query heads on this rank",
            rule="one sink for each query head",
            fix="use tp=1 for this model",
        )


def kept(lse: Tensor, sinks_H: Tensor) -> Tensor:
    """[1, H, t, 1] share of each query's probability that the keys keep, from their log-normaliser [1, H, t]."""
    return torch.sigmoid(lse - sinks_H.detach().to(lse.dtype)[:, None])[..., None]


def through_sinks(d_out: Tensor, out: Tensor, lse: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient for the kernels of the output without sinks, and that of the sinks from this rank's queries.

    ``d_out`` is that of the output with sinks, ``out``.

    Shapes: [1, H, t, d] twice, [1, H, t], [H] -> [1, H, t, d], [H]. Layout: of the sinks partial over cp.
    """
    keep = kept(lse, sinks_H)
    d_sinks_H = -((1 - keep[..., 0]) * (d_out.to(lse.dtype) * out).sum(-1)).sum(dim=(0, 2))
    return (d_out * keep).to(d_out.dtype), d_sinks_H.to(sinks_H.dtype)
