"""Top-k, top-p and min-p: the tokens that a sampler keeps, and the distribution over them.

Letters: N rows | V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.rollouts.sampling import ORDERS, Quantity, Sampling


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
    """Return which tokens top-k, top-p and min-p keep, given log-probabilities after the temperature.

    Formula:  in the order of ``sampling.order``, each on the tokens that those before it left. top-k: as probable as
              the k-th, ties included. top-p: the probability of more probable tokens, renormalized, is below p. min-p:
              at least min_p times the largest probability. The most probable token always stays.
    Shapes:   [N, V] -> [N, V] bool.
    Backward: none.
    Source:   top-p: arXiv 1904.09751; min-p: arXiv 2407.01082; orders: `workbench.rollouts.sampling.ORDERS`. llama.cpp
              divides by the temperature last. Recorded supports do not depend on it.
    """
    logprobs_NV = logprobs_NV.detach().double()
    kept_NV = torch.ones_like(logprobs_NV, dtype=torch.bool)
    for step in ORDERS[sampling.order]:
        kept_NV &= _STEPS[step](logprobs_NV.masked_fill(~kept_NV, -torch.inf), sampling)
    return kept_NV


def _top_k(left_NV: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_k is None or sampling.top_k >= left_NV.shape[1]:
        return torch.ones_like(left_NV, dtype=torch.bool)
    return left_NV >= left_NV.topk(sampling.top_k, dim=1).values[:, -1:]


def _top_p(left_NV: Tensor, sampling: Sampling) -> Tensor:
    if sampling.top_p >= 1:
        return torch.ones_like(left_NV, dtype=torch.bool)
    sorted_NV, order_NV = left_NV.exp().sort(dim=1, descending=True, stable=True)
    before_NV = sorted_NV.cumsum(dim=1) - sorted_NV
    below_NV = before_NV < sampling.top_p * sorted_NV.sum(dim=1, keepdim=True)
    below_NV[:, 0] = True
    return torch.zeros_like(below_NV).scatter(1, order_NV, below_NV)


def _min_p(left_NV: Tensor, sampling: Sampling) -> Tensor:
    probs_NV = left_NV.exp()
    return probs_NV >= sampling.min_p * probs_NV.amax(dim=1, keepdim=True)


_STEPS = {"top_k": _top_k, "top_p": _top_p, "min_p": _min_p}
"""Name -> log-probabilities of what is left, -inf elsewhere, to what it keeps."""


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
