"""Log-probabilities of the quantity that was recorded: raw, after the temperature, or processed by truncation as well.

With z the logits, y the token, T the temperature and K the truncated support:
    raw        z_y - log sum_v exp z_v
    scaled     z_y / T - log sum_v exp(z_v / T)
    processed  z_y / T - log sum_{v in K} exp(z_v / T), the token always in K
    divided    (z_y - log sum_v exp z_v) / T, a mistake that a search tries

K: of the probabilities after the temperature, those of at least min_p times the largest; of these the top_k largest; of
these, renormalized, the fewest that reach top_p. Ties are kept.

Source: vLLM `v1/sample/sampler.py` and `ops/topk_topp_sampler.py` (order; modes `raw_logprobs`,
        `processed_logprobs`); TRL issue 6789 for what a full-vocabulary trainer makes of the last.

Letters: T tokens | V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recorded_quantity(
    logits_TV: Tensor,
    tokens_T: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    logprobs: str,
    softmax_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the log-probability of each token as one side records it, in float64.

    ``softmax_dtype`` is that of the log-softmax; None: the logits' own, at least float32.

    Shapes: [T, V], [T] -> [T].
    """
    wide = softmax_dtype or torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV = logits_TV.to(wide) if logprobs in ("raw", "divided") else logits_TV.to(wide) / temperature
    token_T1 = tokens_T[:, None]
    if logprobs == "processed" and (top_k or top_p < 1 or min_p > 0):
        kept_TV = truncated_support(scaled_TV, top_k=top_k, top_p=top_p, min_p=min_p)
        kept_TV.scatter_(1, token_T1, True)
        scaled_TV = scaled_TV.masked_fill(~kept_TV, -torch.inf)
    values_T = torch.log_softmax(scaled_TV, dim=-1).gather(1, token_T1)[:, 0].double()
    return values_T / temperature if logprobs == "divided" else values_T


def truncated_support(scaled_TV: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return the tokens that truncation keeps, from logits after the temperature. Shapes: [T, V] -> [T, V] bool."""
    kept_TV = torch.ones_like(scaled_TV, dtype=torch.bool)
    if min_p > 0:
        probabilities_TV = torch.softmax(scaled_TV.double(), dim=-1)
        kept_TV &= probabilities_TV >= min_p * probabilities_TV.amax(-1, keepdim=True)
    if 0 < top_k < scaled_TV.shape[1]:
        left_TV = scaled_TV.masked_fill(~kept_TV, -torch.inf)
        kept_TV &= scaled_TV >= left_TV.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        left_TV = torch.softmax(scaled_TV.double().masked_fill(~kept_TV, -torch.inf), dim=-1)
        sorted_TV, order_TV = left_TV.sort(dim=-1, descending=True)
        before_TV = sorted_TV.cumsum(-1) - sorted_TV  # mass of all that are more likely
        kept_TV &= torch.zeros_like(kept_TV).scatter(1, order_TV, before_TV < top_p)
    return kept_TV


def sampling_logprobs(
    logits_TV: Tensor, tokens_T: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Log-probability of each token under the distribution it was drawn from; -inf outside its support.

    Shapes: [T, V], [T] -> [T] float64.
    """
    scaled_TV = logits_TV.double() / temperature
    kept_TV = truncated_support(scaled_TV, top_k=top_k, top_p=top_p, min_p=min_p)
    return torch.log_softmax(scaled_TV.masked_fill(~kept_TV, -torch.inf), -1).gather(1, tokens_T[:, None])[:, 0]
