"""Log-probabilities of the quantity that was recorded: raw, after the temperature, or processed by truncation as well.

With z the logits, y the token, T the temperature and K the truncated support:
    raw        z_y - log sum_v exp z_v
    scaled     z_y / T - log sum_v exp(z_v / T)
    processed  z_y / T - log sum_{v in K} exp(z_v / T), the token always in K
    divided    (z_y - log sum_v exp z_v) / T, a mistake that a search tries

K: what min_p, top_k and top_p keep of the probabilities after the temperature, in the order of the engine; see
`workbench.policy.truncation`.

Source: vLLM `v1/sample/sampler.py` (modes `raw_logprobs`, `processed_logprobs`); TRL issue 6789 for what a
        full-vocabulary trainer makes of the last.

Letters: T tokens | V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.policy.truncation import kept_tokens
from workbench.rollouts.sampling import Sampling


def recorded_quantity(
    logits_TV: Tensor,
    tokens_T: Tensor,
    *,
    temperature: float,
    sampling: Sampling,
    logprobs: str,
    softmax_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the log-probability of each token as one side records it, in float64.

    ``sampling`` is its truncation, ``softmax_dtype`` the dtype of the log-softmax; None: the logits', at least float32.

    Shapes: [T, V], [T] -> [T].
    """
    wide = softmax_dtype or torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV = logits_TV.to(wide) if logprobs in ("raw", "divided") else logits_TV.to(wide) / temperature
    token_T1 = tokens_T[:, None]
    if logprobs == "processed" and sampling.truncates:
        kept_TV = kept_tokens(torch.log_softmax(scaled_TV.double(), dim=-1), sampling)
        kept_TV.scatter_(1, token_T1, True)
        scaled_TV = scaled_TV.masked_fill(~kept_TV, -torch.inf)
    values_T = torch.log_softmax(scaled_TV, dim=-1).gather(1, token_T1)[:, 0].double()
    return values_T / temperature if logprobs == "divided" else values_T


def sampling_logprobs(logits_TV: Tensor, tokens_T: Tensor, *, temperature: float, sampling: Sampling) -> Tensor:
    """Log-probability of each token under the distribution it was drawn from; -inf outside its support.

    Shapes: [T, V], [T] -> [T] float64.
    """
    logprobs_TV = torch.log_softmax(logits_TV.double() / temperature, dim=-1)
    kept_TV = kept_tokens(logprobs_TV, sampling)
    return torch.log_softmax(logprobs_TV.masked_fill(~kept_TV, -torch.inf), -1).gather(1, tokens_T[:, None])[:, 0]
