"""KL penalties: distance of the policy from another one, estimated on the sampled token.

With d = other - policy, in nats, and a sample of the policy:

    estimate    value          path-wise gradient (d estimate / d policy)
    k1          -d             1            no information in expectation
    k2          d^2 / 2        -d           on-policy the gradient of the KL, unbiased
    k3          e^d - 1 - d    1 - e^d      biased as a gradient
    abs         |d|            -sign d
    squared     d^2            -2 d

The gradient of an expectation under the policy has a second part, k * d log policy: the "score" gradient is
k' + k. For k3 the two parts add up to -d, the gradient of k2; for k1 to 1 - d. With an importance weight u in front
both are u times that.

Letters: T packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term, clamped
from workbench.specs.losses import KLSpec


def kl_estimate(d_T: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy || other) per token, from a token that the policy sampled.

    Formula:  see the module docstring; d = other - policy.
    Shapes:   [T] -> [T]. Units: nats; nats squared for squared.
    Backward: ordinary, path-wise; 0 at d = 0 for abs.
    Raises:   SpecError: an unknown estimator.
    Source:   k1, k2, k3: Schulman, "Approximating KL divergence" (2020); k3 in a loss: DeepSeekMath, arXiv
              2402.03300, equation 4; squared: prime-rl.
    """
    if estimator == "k1":
        return -d_T
    if estimator == "k2":
        return 0.5 * d_T.square()
    if estimator == "k3":
        return torch.expm1(d_T) - d_T
    if estimator == "abs":
        return d_T.abs()
    if estimator == "squared":
        return d_T.square()
    raise SpecError(f"KL estimator {estimator!r}", rule="one of k1, k2, k3, abs, squared", fix="correct the spec")


def kl_term(inputs: LossInputs, spec: KLSpec) -> Term:
    """The KL penalty as a term of the loss.

    Formula:  ``clamp(u * k(clamp(d)))``, d = other - policy and u the importance weight: 1, policy / old or
              policy / sampler, or the geometric mean of those over the document. Value the same for every kind of
              gradient.
    Shapes:   inputs of T tokens -> a term of [T] nats. 0 where nothing counts.
    Backward: path:             u k'(d), u taken as data
              score:            u (k'(d) + k(d)): u carries its gradient, and without importance it is the number 1
                                whose gradient is that of log policy
              straight_through: u (-d), that of k2; clamps act on the value only
              Where a clamp binds, path and score have no gradient at all; NeMo-RL does the same.
    Raises:   SpecError: no log-probabilities of the other policy; a penalty that belongs in the reward.
    Source:   clamps and score: NeMo-RL; importance weights that carry a gradient: TRL use_bias_correction_kl, slime
              use_unbiased_kl; straight-through: verl, names that end in "+".
    """
    if spec.placement == "reward":
        raise SpecError(
            "kl_term with placement reward",
            rule="a penalty in the reward is not a term of the loss",
            fix="use kl_in_reward when advantages are computed, and omit the term",
        )
    d_T = -inputs.log_ratio(spec.against)
    anchor_T = inputs.policy_logprobs_T.detach() if spec.importance == "none" else inputs.logprobs(spec.importance)
    log_weight_T = torch.where(inputs.counts_T, inputs.policy_logprobs_T - anchor_T, 0.0)
    log_weight_T = inputs.mean_over(spec.importance_level, log_weight_T)
    with torch.no_grad():
        bound_T = clamped(d_T, spec.input_clamp)
        value_T = log_weight_T.exp() * kl_estimate(bound_T, spec.estimator)
        cut_T = bound_T != d_T
        if spec.output_clamp is not None:
            cut_T |= value_T.abs() > spec.output_clamp
            value_T = value_T.clamp(-spec.output_clamp, spec.output_clamp)
    if spec.gradient == "straight_through":
        half_square_T = kl_estimate(d_T, "k2")
        weight_T = log_weight_T.detach().exp()
        return Term(value_T + weight_T * (half_square_T - half_square_T.detach()), spec.coefficient, weight="penalty")
    # A token without gradient must not pass through exp: where that overflows, 0 * inf would make its gradient NaN.
    open_d_T, open_weight_T = torch.where(cut_T, 0.0, d_T), torch.where(cut_T, 0.0, log_weight_T)
    if spec.gradient == "path":
        open_weight_T = open_weight_T.detach()
    values_T = torch.where(cut_T, value_T, open_weight_T.exp() * kl_estimate(open_d_T, spec.estimator))
    return Term(values_T, spec.coefficient, weight="penalty")


def kl_in_reward(old_logprobs_T: Tensor, ref_logprobs_T: Tensor, loss_mask_T: Tensor, spec: KLSpec) -> Tensor:
    """Penalty subtracted from the reward of each token: coefficient * estimate of KL(old || ref). Data, pre-update.

    The policy that earned the reward is the one at the start of the update. The result is the ``penalties_T`` of
    `workbench.rollouts.advantages`.

    Formula:  ``coefficient * clamp(k(clamp(ref - old)))`` on trained tokens, 0 elsewhere.
    Shapes:   [T] each -> [T]. Units: reward units.
    Backward: none.
    Source:   InstructGPT, arXiv 2203.02155, equation 2 (k1).
    """
    with torch.no_grad():
        d_T = torch.where(loss_mask_T, ref_logprobs_T - old_logprobs_T, 0.0)
        return spec.coefficient * clamped(
            kl_estimate(clamped(d_T, spec.input_clamp), spec.estimator), spec.output_clamp
        )
