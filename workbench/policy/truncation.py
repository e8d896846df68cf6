"""Top-k, top-p and min-p: the tokens that a sampler keeps, and the distribution over them.

Letters: N rows | V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.rollouts.sampling import Quantity, Sampling


class Truncated(NamedTuple):
    """A truncated distribution.

    Attributes:
        kept_NV: [N, V] bool, the truncated support.
        mass_N: [N] probability of the support before the truncation; float64.
        logprobs_NV: [N, V] log-probabilities within it; -inf outside.
    """

    kept_NV: Tensor
    mass_N: Tensor
    logprobs_NV: Tensor


def kept_tokens(logprobs_NV: Tensor, sampling: Sampling) -> Tensor:
    """Return which tokens top-k, then top-p, then min-p keep, given log-probabilities after the temperature.

    Formula:  top-k: as probable as the k-th, ties included. top-p: the probability of more probable tokens, of those
              that top-k left and renormalized, is below p. min-p: at least min_p times the largest probability. The
              most probable token always stays.
    Shapes:   [N, V] -> [N, V] bool.
    Backward: none.
    Source:   top-p: arXiv 1904.09751; min-p: arXiv 2407.01082. The order is that of transformers' logits processors;
              vLLM takes min-p first, llama.cpp divides by the temperature last. Recorded supports do not depend on it.
    """
    probs_NV = logprobs_NV.detach().double().exp()
    kept_NV = torch.ones_like(probs_NV, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < probs_NV.shape[1]:
        kept_NV &= probs_NV >= probs_NV.topk(sampling.top_k, dim=1).values[:, -1:]
    if sampling.top_p < 1:
        left_NV = probs_NV * kept_NV
        sorted_NV, order_NV = left_NV.sort(dim=1, descending=True, stable=True)
        before_NV = sorted_NV.cumsum(dim=1) - sorted_NV
        below_NV = before_NV < sampling.top_p * sorted_NV.sum(dim=1, keepdim=True)
        below_NV[:, 0] = True
        kept_NV &= torch.zeros_like(kept_NV).scatter(1, order_NV, below_NV)
    if sampling.min_p:
        kept_NV &= probs_NV >= sampling.min_p * probs_NV.amax(dim=1, keepdim=True)
    return kept_NV


def truncate(logprobs_NV: Tensor, sampling: Sampling) -> Truncated:
    """Truncate distributions given by log-probabilities after the temperature.

    Shapes:   [N, V] -> see `Truncated`; log-probabilities in their dtype.
    Backward: none.
    """
    kept_NV = kept_tokens(logprobs_NV, sampling)
    cut_NV = logprobs_NV.detach().masked_fill(~kept_NV, -torch.inf)
    log_mass_N1 = torch.logsumexp(cut_NV.double(), dim=1, keepdim=True)
    return Truncated(kept_NV, log_mass_N1[:, 0].exp(), (cut_NV.double() - log_mass_N1).to(logprobs_NV.dtype))


def reported(logits_NV: Tensor, scaled_NV: Tensor, truncated_NV: Tensor, quantity: Quantity) -> Tensor:
    """Return the log-probabilities that an engine of this mode reports; see `workbench.rollouts.sampling`."""
    match quantity:
        case "raw":
            return torch.log_softmax(logits_NV, dim=-1)
        case "scaled":
            return scaled_NV
        case "truncated":
            return truncated_NV
