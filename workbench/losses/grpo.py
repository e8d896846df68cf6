"""GRPO: the clipped surrogate with an asymmetric clip, and a KL penalty to a reference.

Letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term


def clipped_surrogate(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Term:
    """The pessimistic surrogate of PPO, per token.

    Formula:  r = exp(policy - old);  value = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    Shapes:   [T] -> [T].
    Backward: -r A where the unclipped branch is the smaller (ties included), 0 where the clipped one is.
    Source:   PPO, arXiv 1707.06347, equation 7; separate bounds: DAPO, arXiv 2503.14476, equation 10.
    """
    log_ratio_T = inputs.policy_logprobs_T - inputs.old_logprobs_T
    advantages_T = inputs.advantages_T
    with torch.no_grad():
        clipped_T = inputs.frozen_clip_T
        if clipped_T is None:
            ratio_T = log_ratio_T.exp()
            clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T < ratio_T * advantages_T
    # The bound that a clipped token sits at follows from the sign of its advantage; it carries no gradient.
    # (Two Python numbers in `where` would make a float32 tensor, and round the bounds of a float64 loss.)
    upper, lower = log_ratio_T.new_tensor(1 + clip_high), log_ratio_T.new_tensor(1 - clip_low)
    bound_T = torch.where(advantages_T > 0, upper, lower)
    # A token without gradient must not pass through exp: where that overflows, 0 * inf would make its gradient NaN.
    silent_T = clipped_T | (advantages_T == 0)
    ratio_T = torch.exp(torch.where(silent_T, 0.0, log_ratio_T))
    return Term(-torch.where(silent_T, bound_T, ratio_T) * advantages_T, clipped_T=clipped_T)


def kl_k3(policy_logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Estimate KL(policy || reference) per token, from a token that the policy sampled; never negative.

    Formula:  d = ref - policy;  k3 = exp(d) - d - 1
    Shapes:   [T] -> [T]. Units: nats.
    Backward: 1 - exp(d), path-wise (biased as a gradient of the KL).
    Source:   Schulman, "Approximating KL Divergence" (2020); DeepSeekMath, arXiv 2402.03300, equation 4.
    """
    d_T = ref_logprobs_T - policy_logprobs_T
    return torch.expm1(d_T) - d_T


def grpo(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2,
         kl_coefficient: float = 0.0) -> dict[str, Term]:
    """Group-relative policy optimisation, per token.

    Formula:  -min(r A, clip(r) A) + kl_coefficient * k3(policy || reference)
    Shapes:   inputs [T] -> terms "policy" and, if the coefficient is not 0, "kl", each [T].
    Differs from the paper: the weights of tokens (1/|o_i| there) are not here but in `workbench.reduction`;
              two clip bounds; advantages come with the batch.
    Raises:   SpecError: a KL term without reference log-probabilities.
    Source:   DeepSeekMath, arXiv 2402.03300, equation 3.
    """
    terms = {"policy": clipped_surrogate(inputs, clip_low=clip_low, clip_high=clip_high)}
    if kl_coefficient:
        if inputs.ref_logprobs_T is None:
            raise SpecError(f"grpo with kl_coefficient = {kl_coefficient}", found="no ref_logprobs",
                            rule="the KL term needs the reference's log-probabilities",
                            fix="record them with the rollouts, or set kl_coefficient to 0")
        terms["kl"] = Term(kl_k3(inputs.policy_logprobs_T, inputs.ref_logprobs_T), kl_coefficient)
    return terms
