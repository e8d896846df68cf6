"""Token log-probabilities when each tp rank holds a slice of the vocabulary.

With z the logits over temperature, m their maximum, and sums over the *whole* vocabulary:
    s = sum exp(z - m),  u = sum exp(z - m) (z - m),  a = z_target - m
    logprob = a - log s          entropy = log s - u / s          logsumexp = m + log s
One maximum and one sum cross the ranks; nothing crosses them on the way back, because every term of the gradient
    dz_v = g_logprob (1[v = target] - p_v) - g_entropy p_v (z_v - m - u / s) + g_logsumexp p_v,   p_v = exp(z_v - m) / s
is local or already whole.

Letters: T tokens | V vocabulary | D model dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.errors import ShapeError
from workbench.policy.logprobs import TokenLogprobs, logit_divisor
from workbench.shapes import check_shapes
from workbench.sharding.collectives import all_max, all_sum, identity_sum
from workbench.sharding.mesh import Axis


def token_logprobs(hidden_TD: Tensor, local_weight_VD: Tensor, targets_T: Tensor, *, axis: Axis,
                   first_token: int, temperature: float | Tensor = 1.0,
                   local_bias_V: Tensor | None = None) -> TokenLogprobs:
    """Log-probability of each target, entropy and log-normaliser, from a slice of the output head on each tp rank.

    Args:
        hidden_TD: hidden states, the same on every tp rank.
        local_weight_VD: rows ``first_token ...`` of the output head. Ranks may hold different numbers of rows.
        targets_T: ids in the whole vocabulary.
        axis: the tensor-parallel axis.
        first_token: vocabulary id of the first local row.
        temperature: divides the logits; one number, or [T], one for each token.
        local_bias_V: the matching slice of the head's bias.

    Shapes:   hidden_TD [T, D], local_weight_VD [v, D] -> three of [T], the same on every tp rank.
    Units:    nats.
    Backward: hidden: summed over tp, once; weight and bias: local. The incoming gradients must be the same on
              every tp rank.
    Raises:   ShapeError: sizes disagree, a target is outside the whole vocabulary, or a temperature is not positive
              and finite.
    Source:   Megatron-LM, arXiv 1909.08053, section 3 (vocabulary-parallel cross entropy).
    """
    sizes = check_shapes("token_logprobs", hidden_TD=hidden_TD, local_weight_VD=local_weight_VD,
                         targets_T=targets_T, local_bias_V=local_bias_V)
    vocabulary = int(all_sum(torch.tensor(sizes["V"], device=hidden_TD.device), axis))
    if targets_T.numel() and not 0 <= int(targets_T.min()) <= int(targets_T.max()) < vocabulary:
        raise ShapeError("token_logprobs: targets", found=f"ids {int(targets_T.min())} to {int(targets_T.max())}",
                         rule=f"0 <= id < {vocabulary}, the whole vocabulary",
                         fix="replace ids that are not trained by 0 and mask them afterwards")
    logits_TV = identity_sum(hidden_TD, axis) @ local_weight_VD.T
    if local_bias_V is not None:
        logits_TV = logits_TV + local_bias_V
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV = logits_TV.to(wide) / logit_divisor(temperature, targets_T, wide)
    return TokenLogprobs(*_FromLocalLogits.apply(scaled_TV, targets_T - first_token, axis))


class _FromLocalLogits(Function):
    """Local logits over temperature -> log-probability, entropy and log-normaliser of the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, local_targets_T: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        highest_T = all_max(logits_TV.amax(-1), axis)
        shifted_TV = logits_TV - highest_T[:, None]
        mine_T = (local_targets_T >= 0) & (local_targets_T < logits_TV.shape[1])
        index_T = local_targets_T.masked_fill(~mine_T, 0)
        exp_TV = shifted_TV.exp()
        target_T = shifted_TV.gather(-1, index_T[:, None]).squeeze(-1).masked_fill(~mine_T, 0)
        # A logit of -inf (a column that does not exist) has probability 0 and adds nothing to u.
        weighted_T = (exp_TV * shifted_TV.masked_fill(exp_TV == 0, 0)).sum(-1)
        sum_T, weighted_T, target_T = all_sum(torch.stack([exp_TV.sum(-1), weighted_T, target_T]), axis)
        ctx.save_for_backward(exp_TV, shifted_TV, sum_T, weighted_T, index_T, mine_T)
        return target_T - sum_T.log(), sum_T.log() - weighted_T / sum_T, highest_T + sum_T.log()

    @staticmethod
    def backward(ctx: Any, logprob_gradient_T: Tensor, entropy_gradient_T: Tensor,
                 logsumexp_gradient_T: Tensor) -> tuple[Tensor, None, None]:
        exp_TV, shifted_TV, sum_T, weighted_T, index_T, mine_T = ctx.saved_tensors
        probability_TV = exp_TV / sum_T[:, None]
        centred_TV = shifted_TV.masked_fill(exp_TV == 0, 0) - (weighted_T / sum_T)[:, None]
        normaliser_T = logsumexp_gradient_T - logprob_gradient_T
        gradient_TV = probability_TV * (normaliser_T[:, None] - entropy_gradient_T[:, None] * centred_TV)
        gradient_TV.scatter_add_(1, index_T[:, None], (logprob_gradient_T * mine_T)[:, None])
        return gradient_TV, None, None
