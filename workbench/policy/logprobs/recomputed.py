"""The truncated support that the sampler's settings give for the policy's own distribution, for metrics.

A trained token outside of it is one that the policy, sampling with the same settings, would never draw: by rounding, by
updates since, or because the sampler's support was recorded wrongly. Slow and simple: all logits of a chunk of rows,
from every rank; without a gradient.

Letters: T tokens | C rows of a chunk | V vocabulary | D model dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.policy.logprobs.engine import default_chunk
from workbench.policy.logprobs.head import logit_divisor, make_head, upcast
from workbench.policy.truncation import kept_tokens
from workbench.rollouts.sampling import Sampling
from workbench.sharding.collectives import all_sum
from workbench.sharding.mesh import Axis


@torch.no_grad()
def outside_support(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    sampling: Sampling,
    *,
    temperature: float | Tensor = 1.0,
    bias_V: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    valid: int | None = None,
    fp32_head: bool = False,
    axis: Axis | None = None,
    first_token: int = 0,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return which targets top-k, top-p and min-p of the policy's own distribution leave out.

    Arguments as in `logprobs.token_logprobs`. Collective over tp.

    Shapes:   hidden_TD [T, D], weight_VD [V, D], targets_T [T] -> [T] bool; arbitrary where a target is negative.
    Backward: none.
    """
    if fp32_head:
        hidden_TD, weight_VD = upcast(hidden_TD), upcast(weight_VD)
    head = make_head(
        weight_VD,
        bias_V=bias_V,
        logit_scale=logit_scale,
        soft_cap=soft_cap,
        valid=valid,
        axis=axis,
        first_token=first_token,
    )
    chunk_tokens = chunk_tokens or default_chunk(head)
    outside = [torch.zeros(0, dtype=torch.bool, device=hidden_TD.device)]
    for begin in range(0, len(targets_T), chunk_tokens):
        rows = slice(begin, begin + chunk_tokens)
        targets_C = targets_T[rows].clamp_min(0)
        divisor = temperature[rows] if isinstance(temperature, Tensor) else temperature
        dots_CV = (hidden_TD[rows] @ weight_VD.T).to(head.wide)
        local_CV = head.logits_(dots_CV, bias_V, logit_divisor(divisor, targets_C, head.wide))[:, : head.valid]
        logits_CV = local_CV.new_zeros(len(targets_C), head.vocabulary)
        logits_CV[:, first_token : first_token + head.valid] = local_CV
        if axis is not None:
            logits_CV = all_sum(logits_CV, axis)
        kept_CV = kept_tokens(torch.log_softmax(logits_CV, dim=-1), sampling)
        outside.append(~kept_CV.gather(1, targets_C[:, None])[:, 0])
    return torch.cat(outside)
