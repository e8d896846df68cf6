"""Surrogates with one ratio per document. Its sums come from `LossInputs.document_sums`, which may cross ranks.

Letters: T packed tokens. d = l - anchor log ratio of a token, L trained tokens of its document, s sequence ratio,
A advantage, sg[] without gradient. Means and sums over t' run over the trained tokens of the token's own document.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from workbench.losses.clipped import clip_ratio
from workbench.losses.terms import LossInputs, Term

TOKEN_LOG_CLAMP = 20.0
"""vespo: bound of a token's log ratio inside the sequence weight; that of huggingface/trl."""
SEQUENCE_LOG_CLAMP = (math.log(1e-8), 20.0)
"""vespo: bounds of the log of the sequence weight; those of huggingface/trl."""


def gspo(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    delta: float | None = None,
    level: str = "document",
    advantage_level: str = "token",
    anchor: str = "old",
) -> Term:
    """Group sequence policy optimisation: PPO's clip on the geometric mean of a document's ratios.

    Formula:  s = exp(mean_t' d);  value = -min(min(s, delta) A, clip(s, 1 - clip_low, 1 + clip_high) A), on every token
    Shapes:   [T] -> [T]; the same on every token of a document where A is.
    Backward: through the mean: a token gets 1 / L of the sum over its document of -w s A, 0 where clipped.
    Source:   GSPO, arXiv 2507.18071, equations 5 and 7.
    Differs:  A may vary within a document (or, with advantage_level "document", is averaged there, as in Fast-LLM and
              AReaL). level "segment" takes the mean over each unbroken run of trained tokens (ROLL, multi-turn).
              The paper's mean over documents is denominator "document".
    """
    return clip_ratio(
        log_sequence_ratio(inputs, level, anchor),
        advantages_at(inputs, advantage_level),
        inputs.frozen_clip_T,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        delta=delta,
    )


def gspo_token(
    inputs: LossInputs,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    level: str = "document",
    log_cap: float | None = None,
    anchor: str = "old",
) -> Term:
    """GSPO with a gradient of its own for every token, for advantages that vary within a document.

    Formula:  s_t = min(sg[s] exp(l - sg[l]), exp(log_cap));
              value = -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)
    Shapes:   [T] -> [T].
    Backward: -s A, 0 where clipped and where log s is above log_cap.
    Source:   GSPO, arXiv 2507.18071, equations 13 and 14.
    Differs:  log_cap is none in the paper, and 10 in verl.
    """
    logprobs_T = inputs.counted_logprobs_T
    log_ratio_T = log_sequence_ratio(inputs, level, anchor).detach() + (logprobs_T - logprobs_T.detach())
    capped_T = log_ratio_T if log_cap is None else log_ratio_T.clamp(max=log_cap)
    term = clip_ratio(
        capped_T,
        inputs.counted_advantages_T,
        inputs.frozen_clip_T,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    if log_cap is None:
        return term
    return replace(term, silent_T=(capped_T != log_ratio_T) | (inputs.counted_advantages_T == 0))


def luspo(
    inputs: LossInputs,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
    dual_clip: float | None = None,
    delta: float | None = None,
    advantage_level: str = "token",
    anchor: str = "old",
) -> Term:
    """Length-unbiased sequence policy optimisation: GSPO times the length of the document.

    Formula:  value = L * (value of gspo)
    Shapes:   [T] -> [T].
    Backward: L times that of `gspo`.
    Source:   LUSPO, arXiv 2602.05261; its mean over documents is denominator "document".
    Differs:  not at all in the policy term; a KL term is not multiplied by L (in huggingface/trl it is, as in `gspo`
              with denominator "document_sum").
    """
    term = gspo(
        inputs,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        delta=delta,
        advantage_level=advantage_level,
        anchor=anchor,
    )
    return replace(term, values_T=inputs.document_lengths_T * term.values_T)


def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4, anchor: str = "old") -> Term:
    """Geometric-mean policy optimisation: each token's log ratio is clipped before the document's mean.

    Formula:  d~ = min(d, clip_high) if A > 0, max(d, -clip_low) if A < 0, 0 if A = 0
              value = -A exp(mean_t' d~)
    Shapes:   [T] -> [T]. Bounds are distances from 0 of the *log* ratio.
    Backward: through the mean: a token that is not clipped gets 1 / L of the sum over its document of -w A exp(...).
    Source:   GMPO, arXiv 2507.20673.
    Differs:  the paper averages over documents (denominator "document"); verl's "geo_mean" over all rows of a
              micro-batch, empty ones too.
    """
    advantages_T, log_ratio_T = inputs.counted_advantages_T, inputs.log_ratio(anchor)
    with torch.no_grad():
        high, low = log_ratio_T.new_full((), clip_high), log_ratio_T.new_full((), -clip_low)
        bound_T = torch.where(advantages_T > 0, high, low)
        clipped_T = ((advantages_T > 0) & (log_ratio_T > high)) | ((advantages_T < 0) & (log_ratio_T < low))
        if inputs.frozen_clip_T is not None:
            clipped_T = inputs.frozen_clip_T
    silent_T = advantages_T == 0
    bounded_T = torch.where(silent_T, 0.0, torch.where(clipped_T, bound_T, log_ratio_T))
    ratio_T = torch.exp(torch.where(silent_T, 0.0, inputs.document_mean(bounded_T)))
    return Term(-advantages_T * ratio_T, clipped_T=clipped_T)


def vespo(
    inputs: LossInputs,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    anchor: str = "old",
    log_correction_T: Tensor | None = None,
) -> Term:
    """A policy gradient whose weight is a gamma-shaped function of the document's whole importance weight.

    Formula:  log w = clip(log_correction + sum_t' clip(d, -20, 20), log 1e-8, 20)
              phi = exp(lambda + k log w - lambda w);  value = -sg[phi] A l
              (k, lambda) = (k_positive, lambda_positive) where A >= 0, else (k_negative, lambda_negative)
    Shapes:   [T] -> [T]. The value is not comparable with a ratio's. phi is 1 on-policy.
    Backward: -phi A.
    Source:   VESPO, arXiv 2602.10693; clamps and defaults are those of huggingface/trl.
    Differs:  with anchor "sampler" w is the whole ratio of policy to sampler; huggingface/trl has a bounded one, by a
              correction of the sampler that enters w (``log_correction_T``, see `workbench.losses.corrections`). A phi
              that overflows is 0, as there.
    """
    advantages_T = inputs.counted_advantages_T
    with torch.no_grad():
        log_ratio_T = inputs.log_ratio(anchor).clamp(-TOKEN_LOG_CLAMP, TOKEN_LOG_CLAMP)
        log_w_T = inputs.document_sums.document(log_ratio_T)
        if log_correction_T is not None:
            log_w_T = log_w_T + log_correction_T
        log_w_T = log_w_T.clamp(*SEQUENCE_LOG_CLAMP)
        rising_T = advantages_T >= 0
        k_T, lambda_T = (
            torch.where(rising_T, log_w_T.new_full((), up), log_w_T.new_full((), down))
            for up, down in ((k_positive, k_negative), (lambda_positive, lambda_negative))
        )
        phi_T = torch.exp(lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp())
        phi_T = torch.where(phi_T.isinf(), 0.0, phi_T)
    return Term(-phi_T * advantages_T * inputs.counted_logprobs_T, extras={"sequence_weight": phi_T})


def log_sequence_ratio(inputs: LossInputs, level: str, anchor: str) -> Tensor:
    """[T] log of the geometric mean of the ratios at a level of `LossInputs.mean_over`, on each of its tokens."""
    return inputs.mean_over(level, inputs.log_ratio(anchor))


def advantages_at(inputs: LossInputs, advantage_level: str) -> Tensor:
    """[T] advantages of the tokens ("token"), or their means over the document ("document"); 0 where nothing counts."""
    return torch.where(inputs.counts_T, inputs.mean_over(advantage_level, inputs.counted_advantages_T), 0.0)
