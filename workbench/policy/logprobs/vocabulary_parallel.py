"""Token log-probabilities when each tp rank holds a slice of the vocabulary.

With z the logits over temperature, m their maximum, and sums over the *whole* vocabulary:
    s = sum exp(z - m),  u = sum exp(z - m) (z - m),  a = z_target - m
    logprob = a - log s          entropy = log s - u / s          logsumexp = m + log s
Forward needs one all-reduced maximum and one sum; backward needs no collective, because every term of the gradient
    dz_v = g_logprob (1[v = target] - p_v) - g_entropy p_v (z_v - m - u / s) + g_logsumexp p_v,   p_v = exp(z_v - m) / s
is local or already reduced.

Letters: T tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.errors import SpecError
from workbench.policy.logprobs.head import (
    TokenLogprobs,
    check_rows,
    computed_rows,
    local_columns,
    logit_divisor,
    make_head,
    upcast,
)
from workbench.policy.logprobs.truncated_support import TruncatedSupport, check_support
from workbench.sharding.collectives import all_max, all_sum, identity_sum, sum_identity
from workbench.sharding.mesh import Axis


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    *,
    axis: Axis,
    first_token: int,
    temperature: float | Tensor = 1.0,
    active_T: Tensor | None = None,
    support: TruncatedSupport | None = None,
    outputs: Iterable[str] = ("entropy", "logsumexp"),
    fp32_head: bool = False,
    **head_settings: Any,
) -> TokenLogprobs:
    """Compute the head's outputs per token, from a slice of the head on each tp rank; see `logprobs.token_logprobs`.

    Further settings are those of `head.make_head`.

    Shapes:   hidden_TD [T, D], weight_VD [v, D] of any v -> [T] each, the same on every tp rank.
    Units:    nats.
    Backward: hidden: summed over tp, once; weight and bias: local. The incoming gradients must be the same on
              every tp rank.
    Raises:   ShapeError, SpecError: see `head` and `truncated_support`.
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (vocabulary-parallel cross entropy).
    """
    outputs = frozenset(outputs)
    if fp32_head:
        hidden_TD, weight_VD = upcast(hidden_TD), upcast(weight_VD)
    head = make_head(weight_VD, axis=axis, first_token=first_token, **head_settings)
    check_rows(head, hidden_TD, targets_T, temperature=temperature, active_T=active_T, outputs=outputs)
    active_T = computed_rows(targets_T, active_T)
    logits_TV = identity_sum(hidden_TD.where(active_T[:, None], 0.0), axis) @ weight_VD.T
    if head.bias_V is not None:
        logits_TV = logits_TV + head.bias_V
    logits_TV = logits_TV.to(head.wide) * head.logit_scale
    if head.soft_cap is not None:
        logits_TV = head.soft_cap * torch.tanh(logits_TV / head.soft_cap)
    columns_V = torch.arange(head.valid, device=weight_VD.device)
    scaled_TV = logits_TV[:, : head.valid] / logit_divisor(temperature, targets_T, head.wide)
    local_T = targets_T.where(active_T, 0) - first_token
    logprobs_T, entropy_T, logsumexp_T = _FromLocalLogits.apply(scaled_TV, local_T, axis)
    output = TokenLogprobs(
        logprobs_T, entropy_T if "entropy" in outputs else None, logsumexp_T if "logsumexp" in outputs else None
    )
    if "mean_squared_logit" in outputs:
        squares_T = scaled_TV.where(scaled_TV != -torch.inf, 0.0).square().sum(-1)
        output = output._replace(mean_squared_logit_T=sum_identity(squares_T, axis) / head.vocabulary)
    if "mean_logit" in outputs:
        output = output._replace(mean_logit_T=whole_mean(scaled_TV, head.vocabulary, axis))
    if support is not None:
        check_support(support, targets_T, head)
        cut_TV = active_T[:, None] & ~_is_kept(support, local_T, columns_V, first_token)
        kept_TV = scaled_TV.masked_fill(cut_TV, -torch.inf)
        logprobs_T, entropy_T, _ = _FromLocalLogits.apply(kept_TV, local_T, axis)
        output = output._replace(
            support_logprobs_T=logprobs_T, support_entropy_T=entropy_T if "entropy" in outputs else None
        )
    return output.map(lambda x_T: x_T.where(active_T, 0.0))


def whole_mean(logits_TV: Tensor, vocabulary: int, axis: Axis) -> Tensor:
    """Mean of each token's logits over the whole vocabulary, from a slice of it on each tp rank, of any size.

    Shapes:   [T, v] -> [T], the same on every tp rank.
    Backward: 1 / vocabulary on every local column; local.
    Source:   NVIDIA/Megatron-LM#7452, finding 1, is the mean over the slice: fault smoothing_over_local_vocabulary.
    """
    return sum_identity(logits_TV.sum(-1), axis) / vocabulary


def _is_kept(support: TruncatedSupport, local_T: Tensor, columns_V: Tensor, first_token: int) -> Tensor:
    """[T, v]: True if in the token's truncated support; an empty set means all, any other includes the target."""
    is_kept_TV = columns_V == local_T[:, None]
    for token, ids in enumerate(support.ids_P.split(support.offsets_S.diff().tolist())):
        is_kept_TV[token] |= torch.isin(columns_V + first_token, ids.to(columns_V)) if len(ids) else True
    return is_kept_TV


class _FromLocalLogits(Function):
    """Local logits over temperature -> log-probability, entropy and log-normaliser of the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, local_targets_T: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = logits_TV.shape
        highest_T = all_max(logits_TV.amax(-1) if columns else logits_TV.new_full((rows,), -torch.inf), axis)
        shifted_TV = logits_TV - highest_T[:, None]
        index_T, is_local_T = local_columns(local_targets_T, columns)
        exp_TV = shifted_TV.exp()
        target_T = torch.zeros_like(highest_T)
        if columns:
            target_T = shifted_TV.gather(-1, index_T[:, None]).squeeze(-1).masked_fill(~is_local_T, 0)
        # A logit of -inf (a column that does not exist) has probability 0 and adds nothing to u.
        weighted_T = (exp_TV * shifted_TV.masked_fill(exp_TV == 0, 0)).sum(-1)
        sum_T, weighted_T, target_T = all_sum(torch.stack([exp_TV.sum(-1), weighted_T, target_T]), axis)
        ctx.save_for_backward(exp_TV, shifted_TV, sum_T, weighted_T, index_T, is_local_T)
        return target_T - sum_T.log(), sum_T.log() - weighted_T / sum_T, highest_T + sum_T.log()

    @staticmethod
    def backward(
        ctx: Any, logprob_gradient_T: Tensor, entropy_gradient_T: Tensor, logsumexp_gradient_T: Tensor
    ) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise SpecError(
                "token_logprobs: implementation = 'vocabulary_parallel' with create_graph = True",
                rule="its gradient has no derivative of its own",
                fix="use reference, which has tp = 1",
            )
        exp_TV, shifted_TV, sum_T, weighted_T, index_T, is_local_T = ctx.saved_tensors
        probability_TV = exp_TV / sum_T[:, None]
        centred_TV = shifted_TV.masked_fill(exp_TV == 0, 0) - (weighted_T / sum_T)[:, None]
        normaliser_T = logsumexp_gradient_T - logprob_gradient_T
        gradient_TV = probability_TV * (normaliser_T[:, None] - entropy_gradient_T[:, None] * centred_TV)
        if gradient_TV.shape[1]:
            gradient_TV.scatter_add_(1, index_T[:, None], (logprob_gradient_T * is_local_T)[:, None])
        return gradient_TV, None, None
