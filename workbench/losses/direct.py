"""Surrogates that clip no token: plain, importance-weighted, on-policy, truncated (CISPO); likelihood of tokens (SFT).

Letters: T packed tokens. l log-probability of the policy, r ratio, A advantage, sg[] without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.sequence import log_sequence_ratio
from workbench.losses.terms import LossInputs, Term, clamped


def importance_sampling(inputs: LossInputs, *, anchor: str = "old") -> Term:
    """The off-policy policy gradient, unclipped.

    Formula:  r = exp(l - anchor);  value = -r A
    Shapes:   [T] -> [T].
    Backward: -r A.
    Source:   conservative policy iteration's surrogate, as in PPO, arXiv 1707.06347, equation 6.
    """
    advantages_T = inputs.counted_advantages_T
    ratio_T = torch.exp(torch.where(advantages_T == 0, 0.0, inputs.log_ratio(anchor)))
    return Term(-ratio_T * advantages_T)


def reinforce(inputs: LossInputs) -> Term:
    """The on-policy policy gradient, as if the policy had not moved since it was sampled.

    Formula:  value = -A l
    Shapes:   [T] -> [T]. The value is not comparable with a ratio's.
    Backward: -A.
    Source:   Williams (1992), Machine Learning 8.
    """
    return Term(-inputs.counted_advantages_T * inputs.counted_logprobs_T)


def gpg(inputs: LossInputs) -> Term:
    """Group policy gradient: the same per-token value as `reinforce`.

    Formula:  value = -A l, with the advantages of the estimator "gpg" of `workbench.rollouts.advantages`
    Shapes:   [T] -> [T].
    Backward: -A.
    Source:   GPG, arXiv 2504.02546.
    Differs:  alpha (documents / documents in groups of unequal rewards) is a number of the whole step and part of the
              advantages, which are data; elsewhere each micro-batch may compute its own.
    """
    return reinforce(inputs)


def on_policy(inputs: LossInputs) -> Term:
    """The surrogate of PPO with a ratio that is 1 by definition: exact for the first step after sampling.

    Formula:  r = exp(l - sg[l]);  value = -r A
    Shapes:   [T] -> [T]; equal to -A.
    Backward: -A.
    Source:   NVIDIA-NeMo/RL, force_on_policy_ratio; huggingface/trl with num_iterations = 1.
    """
    logprobs_T = inputs.counted_logprobs_T
    return Term(-torch.exp(logprobs_T - logprobs_T.detach()) * inputs.counted_advantages_T)


def cispo(
    inputs: LossInputs,
    *,
    clip_low: float | None = None,
    clip_high: float = 4.0,
    bounds: str = "relative",
    level: str = "token",
    log_clamp: float | None = None,
    anchor: str = "old",
) -> Term:
    """A policy gradient whose importance weight is truncated, so that no token loses its gradient.

    Formula:  r = exp(clamp(l - anchor, -log_clamp, log_clamp));  value = -A sg[clip(r, low, high)] l
              relative bounds: low = 1 - clip_low, high = 1 + clip_high; absolute bounds: low = clip_low,
              high = clip_high; clip_low None: no lower bound
              level "document" or "segment": l - anchor is its mean there, as in `gspo`
    Shapes:   [T] -> [T]. The value is not comparable with a ratio's. extras: "ratio_truncated", r was outside.
    Backward: -A clip(r), whatever the sign of A.
    Source:   MiniMax-M1, arXiv 2506.13585 (relative); ScaleRL, arXiv 2510.13786, and
              huggingface/trl (absolute upper bound, no lower one; with importance_sampling_level "sequence" a ratio of
              documents).
    """
    relative = bounds == "relative"
    high = 1 + clip_high if relative else clip_high
    low = 0.0 if clip_low is None else 1 - clip_low if relative else clip_low
    with torch.no_grad():
        ratio_T = clamped(log_sequence_ratio(inputs, level, anchor), log_clamp).exp()
        weight_T = ratio_T.clamp(low, high)
    values_T = -inputs.counted_advantages_T * weight_T * inputs.counted_logprobs_T
    return Term(values_T, extras={"ratio_truncated": weight_T != ratio_T})


def sft(inputs: LossInputs, *, label_smoothing: float = 0.0) -> Term:
    """Negative log-likelihood, of labels that are smoothed over the whole vocabulary.

    Formula:  value = -(1 - e) l - e (1 / V) sum_v log p_v,   e = label_smoothing, V the tokens that exist
              sum_v log p_v / V = mean logit - log normaliser
    Shapes:   [T] -> [T]. Units: nats.
    Backward: -(1 - e) to l, e to the log normaliser and -e to the mean logit: p_v - (1 - e) 1[v = target] - e / V.
    Raises:   SpecError: smoothing without a mean of logits.
    Source:   maximum likelihood; smoothing: Szegedy et al., arXiv 1512.00567, section 7, in the convention of torch's
              cross_entropy, whose e / V is also the target's.
    Differs:  Megatron-LM gives e / (V - 1) to each other token and 1 - e to the target: e (V - 1) / V of its e here is
              the same loss. Over tp it takes the mean over a rank's slice (NVIDIA/Megatron-LM#7452, finding 1).
    """
    values_T = -inputs.counted_logprobs_T
    if label_smoothing:
        values_T = (1 - label_smoothing) * values_T + label_smoothing * mean_surprisal(inputs)
    return Term(values_T, silent_T=~inputs.counts_T)


def mean_surprisal(inputs: LossInputs) -> Tensor:
    """[T] mean over the whole vocabulary of -log p: cross entropy of a uniform label; 0 where nothing counts.

    Units:    nats.
    Backward: 1 to the log normaliser, -1 to the mean logit.
    Raises:   SpecError: the head returned no mean of logits.
    """
    if inputs.mean_logit_T is None or inputs.logsumexp_T is None:
        raise SpecError(
            "label_smoothing",
            found="no mean_logit_T and logsumexp_T",
            rule="labels are smoothed over the whole vocabulary, which only the output head sees",
            fix="request both outputs of the head, or leave surrogate.label_smoothing at 0",
        )
    return torch.where(inputs.counts_T, inputs.logsumexp_T - inputs.mean_logit_T, 0.0)


def positive_nll(inputs: LossInputs, *, coefficient: float) -> Term:
    """Negative log-likelihood of the documents that earned a positive reward.

    Formula:  value = -l if the document's reward > 0, else 0;  weight 1 / (tokens of such documents in the whole step)
    Shapes:   [T] -> [T]. Units: nats.
    Backward: -1 or 0.
    Raises:   SpecError: the batch has no rewards.
    Source:   VAPO, arXiv 2504.05118.
    Differs:  not at all. Elsewhere the divisor is counted in each micro-batch (NVIDIA-NeMo/RL#3791), or the term is
              silently absent without rewards (#3792).
    """
    if inputs.rewards_T is None:
        raise SpecError(
            f"positive_nll_coefficient = {coefficient}",
            found="no rewards",
            rule="the term imitates documents with a positive reward",
            fix="give the batch rewards, or set positive_nll_coefficient to 0",
        )
    imitated_T = inputs.counts_T & (inputs.rewards_T > 0)
    return Term(torch.where(imitated_T, -inputs.counted_logprobs_T, 0.0), coefficient, weight="positive_token")
