"""Surrogates that select a few tokens: those with the highest covariance of log-probability and advantage.

The mean advantage, the mean log-probability and the selected share are taken over this rank's tokens of this
micro-batch, because the policy's log-probabilities of other micro-batches are not known yet. A loss of this kind is
therefore *not* invariant under splitting: `workbench.specs.losses.SURROGATE_BREAKS` declares it.

Letters: T packed tokens. l log-probability of the policy, r ratio, A advantage; means over the tokens that count here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workbench.losses.clipped import clip_ratio
from workbench.losses.terms import LossInputs, Term


def clip_cov(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cov_fraction: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    anchor: str = "old",
) -> Term:
    """PPO's clip, without gradient for a few tokens of high covariance.

    Formula:  cov = (A - mean A) (l - mean l)
              candidates: cov_low < cov < cov_high, and not clipped by PPO
              selected: max(1, floor(cov_fraction n)) of them, of n tokens that count here
              value = 0 where selected, PPO's elsewhere
    Shapes:   [T] -> [T]. extras: "selected".
    Backward: that of `clipped_surrogate`; 0 where selected.
    Source:   Clip-Cov, arXiv 2505.22617.
    Differs:  the paper selects candidates at random (verl: from a global generator). Here a hash of a token's index in
              the source batch orders them, so that a repeated run selects the same.
              With frozen decisions, a frozen token that PPO alone would not clip counts as selected.
    """
    log_ratio_T, advantages_T = inputs.log_ratio(anchor), inputs.counted_advantages_T
    own_T = clip_ratio(log_ratio_T, advantages_T, clip_low=clip_low, clip_high=clip_high).clipped_T
    assert own_T is not None, "`clip_ratio` sets it"
    with torch.no_grad():
        cov_T = _covariance(inputs)
        candidates_T = inputs.counts_T & ~own_T & (cov_T > cov_low) & (cov_T < cov_high)
        order_T = torch.where(candidates_T, _hash(inputs), torch.iinfo(torch.long).max)
        selected_T = candidates_T & _first(order_T, _share(inputs, cov_fraction))
        if inputs.frozen_clip_T is not None:
            selected_T = inputs.frozen_clip_T & ~own_T
    clipped_T = own_T if inputs.frozen_clip_T is None else inputs.frozen_clip_T
    unselected_T = torch.where(selected_T, 0.0, advantages_T)
    term = clip_ratio(log_ratio_T, unselected_T, clipped_T, clip_low=clip_low, clip_high=clip_high)
    return replace(term, clipped_T=clipped_T | selected_T, extras={"selected": selected_T})


def kl_cov(
    inputs: LossInputs, *, cov_fraction: float = 2e-4, cov_coefficient: float = 1.0, anchor: str = "old"
) -> Term:
    """The unclipped surrogate plus a penalty on the tokens of highest covariance.

    Formula:  d = l - anchor;  value = -exp(d) A, plus cov_coefficient |d| on the max(1, floor(cov_fraction n)) tokens
              of largest cov = (A - mean A) (l - mean l)
    Shapes:   [T] -> [T]. extras: "selected".
    Backward: -r A, plus cov_coefficient sign(d) where selected (0 at d = 0).
    Source:   KL-Cov, arXiv 2505.22617.
    Differs:  ties in covariance go to the earlier token of the row.
    """
    log_ratio_T, advantages_T = inputs.log_ratio(anchor), inputs.counted_advantages_T
    with torch.no_grad():
        order_T = torch.where(inputs.counts_T, -_covariance(inputs), torch.inf)
        selected_T = inputs.counts_T & _first(order_T, _share(inputs, cov_fraction))
    ratio_T = torch.exp(torch.where(advantages_T == 0, 0.0, log_ratio_T))
    penalty_T = cov_coefficient * torch.where(selected_T, log_ratio_T.abs(), 0.0)
    pulled_T = selected_T & (log_ratio_T.detach() != 0) if cov_coefficient else torch.zeros_like(selected_T)
    return Term(
        penalty_T - ratio_T * advantages_T, silent_T=(advantages_T == 0) & ~pulled_T, extras={"selected": selected_T}
    )


def _covariance(inputs: LossInputs) -> Tensor:
    count = inputs.counts_T.sum().clamp_min(1)
    advantages_T, logprobs_T = inputs.counted_advantages_T, inputs.counted_logprobs_T
    return (advantages_T - advantages_T.sum() / count) * (logprobs_T - logprobs_T.sum() / count)


def _share(inputs: LossInputs, fraction: float) -> int:
    return max(1, int(fraction * int(inputs.counts_T.sum())))


def _first(order_T: Tensor, count: int) -> Tensor:
    """[T] bool: the ``count`` smallest; ties go to the earlier token."""
    chosen_T = torch.zeros_like(order_T, dtype=torch.bool)
    chosen_T[order_T.argsort(stable=True)[:count]] = True
    return chosen_T


def _hash(inputs: LossInputs) -> Tensor:
    """[T] long below 2^32, spread evenly: two rounds of multiply and shift on the token's index in the source."""
    source_T = inputs.source_T
    if source_T is None:
        source_T = torch.arange(inputs.counts_T.shape[0], device=inputs.counts_T.device)
    mixed_T = (source_T.long() & 0x7FFFFFFF) + 1
    for factor in (0x9E3779B1, 0x85EBCA6B):
        mixed_T = (mixed_T & 0x7FFFFFFF) * factor & 0xFFFFFFFF
        mixed_T = mixed_T ^ (mixed_T >> 15)
    return mixed_T
