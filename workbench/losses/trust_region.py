"""Surrogates with a trust region: they drop a token whose *probability* moved too far, or damp a ratio smoothly.

Letters: T packed tokens. p = exp(l) and q probabilities of the token under the policy and under the anchor,
r = p / q, d = log r, A advantage, sg[] without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.losses.sequence import advantages_at, log_sequence_ratio
from workbench.losses.terms import LossInputs, Term, clamped


def dppo_tv(
    inputs: LossInputs,
    *,
    threshold_low: float = 0.15,
    threshold_high: float = 0.15,
    ratio_cap: float | None = None,
    log_clamp: float | None = None,
    anchor: str = "sampler",
) -> Term:
    """Divergence proximal policy optimisation with the binary total variation.

    Formula:  dropped: p - q > threshold_high where A > 0;  p - q < -threshold_low elsewhere
              value = -A r if not dropped, else 0;  with a ratio_cap: -A sg[min(r, ratio_cap)] l
              log r is clamped to +-log_clamp, without gradient beyond
    Shapes:   [T] -> [T].
    Backward: -A min(r, ratio_cap), or 0 where dropped. On a threshold the token is kept.
    Source:   DPPO, arXiv 2602.04879, equation 12; the cap is that of verl's "dppo_tv".
    """
    dropped_T = _beyond(inputs, _moved(inputs, anchor), threshold_low, threshold_high)
    return _masked_ratio(inputs, dropped_T, ratio_cap, anchor, log_clamp)


def dppo_kl(
    inputs: LossInputs,
    *,
    threshold_low: float = 0.05,
    threshold_high: float = 0.05,
    ratio_cap: float | None = None,
    log_clamp: float | None = None,
    anchor: str = "sampler",
) -> Term:
    """Divergence proximal policy optimisation with the binary KL divergence.

    Formula:  D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
              dropped: D > threshold_high and p > q where A > 0;  D > threshold_low and p < q elsewhere
              value as in `dppo_tv`
    Shapes:   [T] -> [T]. Thresholds in nats.
    Backward: -A min(r, ratio_cap), or 0 where dropped. On a threshold the token is kept.
    Source:   DPPO, arXiv 2602.04879, equations 12 and 14.
    """
    with torch.no_grad():
        policy_T, anchor_T = inputs.counted_logprobs_T, _anchor(inputs, anchor)
        q_T = anchor_T.exp()
        rest_q_T, rest_p_T = -torch.expm1(anchor_T), -torch.expm1(policy_T)
        taken_T = torch.where(q_T > 0, q_T * (anchor_T - policy_T), 0.0)
        others_T = torch.where(rest_q_T > 0, rest_q_T * (rest_q_T.log() - rest_p_T.log()), 0.0)
        signed_T = torch.sign(policy_T - anchor_T) * (taken_T + others_T)
    dropped_T = _beyond(inputs, signed_T, threshold_low, threshold_high)
    return _masked_ratio(inputs, dropped_T, ratio_cap, anchor, log_clamp)


def ipo(inputs: LossInputs, *, threshold: float = 0.1, anchor: str = "sampler") -> Term:
    """The importance-weighted policy gradient of the tokens whose probability has not moved far in either direction.

    Formula:  dropped: |p - q| > threshold;  value = -A r if not dropped, else 0
    Shapes:   [T] -> [T].
    Backward: -A r, or 0 where dropped, whatever the sign of A. On the threshold the token is kept.
    Source:   PrimeIntellect-ai/prime-rl, loss "ipo". Its quadratic term is `kl` with the estimator "squared"
              against the sampler (the preset "ipo" has both).
    """
    return _masked_ratio(inputs, _moved(inputs, anchor).abs() > threshold, None, anchor)


def ref_kl(inputs: LossInputs, *, threshold_low: float = 0.2, anchor: str = "sampler") -> Term:
    """On-policy distillation: the policy gradient with the log ratio of the reference to the policy as advantage.

    Formula:  a = sg[ref - l];  dropped: p - q < -threshold_low;  value = -a r if not dropped, else 0
    Shapes:   [T] -> [T]. Advantages are not used.
    Backward: -a r, or 0 where dropped, whatever the sign of a. On the threshold the token is kept.
    Raises:   SpecError: no reference.
    Source:   PrimeIntellect-ai/prime-rl, loss component "ref_kl". Its quadratic term is `kl` with the estimator
              "squared" against the sampler.
    """
    advantages_T = -inputs.log_ratio("ref").detach()
    return _masked_ratio(inputs, _moved(inputs, anchor) < -threshold_low, None, anchor, advantages_T=advantages_T)


def _anchor(inputs: LossInputs, anchor: str) -> Tensor:
    return torch.where(inputs.counts_T, inputs.logprobs(anchor), 0.0)


def _moved(inputs: LossInputs, anchor: str) -> Tensor:
    """[T] p - q, without gradient."""
    return inputs.counted_logprobs_T.detach().exp() - _anchor(inputs, anchor).detach().exp()


def _beyond(inputs: LossInputs, moved_T: Tensor, low: float, high: float) -> Tensor:
    """True if a token has moved too far in the direction of its advantage; an advantage of 0 counts as negative."""
    return torch.where(inputs.counted_advantages_T > 0, moved_T > high, moved_T < -low)


def _masked_ratio(
    inputs: LossInputs,
    dropped_T: Tensor,
    ratio_cap: float | None,
    anchor: str,
    log_clamp: float | None = None,
    advantages_T: Tensor | None = None,
) -> Term:
    own = advantages_T is None
    advantages_T = inputs.counted_advantages_T if advantages_T is None else advantages_T
    dropped_T = dropped_T & inputs.counts_T if inputs.frozen_clip_T is None else inputs.frozen_clip_T
    silent_T = dropped_T | (advantages_T == 0)
    ratio_T = clamped(torch.where(silent_T, 0.0, inputs.log_ratio(anchor)), log_clamp).exp()
    if ratio_cap is not None:
        ratio_T = ratio_T.detach().clamp(max=ratio_cap) * inputs.counted_logprobs_T
    values_T = torch.where(silent_T, 0.0, -advantages_T * ratio_T)
    return Term(values_T, clipped_T=dropped_T, silent_T=None if own else advantages_T == 0)


SATURATED = 800.0
"""tau (r - 1) beyond which sigmoid is 1 and its derivative 0 in float64."""


def sapo(
    inputs: LossInputs,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    level: str = "token",
    advantage_level: str = "token",
    log_clamp: float | None = None,
    anchor: str = "old",
) -> Term:
    """A soft trust region: a sigmoid of the ratio, steeper where the advantage is not positive.

    Formula:  r = exp(d), d = l - anchor (level "document" or "segment": its mean there, as in `gspo`)
              tau = tau_positive if A > 0, else tau_negative; d is clamped to +-log_clamp, without gradient beyond
              value = -(4 / tau) sigmoid(tau (r - 1)) A
    Shapes:   [T] -> [T].
    Backward: -A r sech^2(tau (r - 1) / 2); on-policy -A. Through the mean where the level is not "token".
    Source:   SAPO, arXiv 2511.20347; a ratio of documents, with A averaged there (advantage_level "document"): AReaL.
    """
    advantages_T = advantages_at(inputs, advantage_level)
    log_ratio_T = log_sequence_ratio(inputs, level, anchor)
    positive, negative = log_ratio_T.new_full((), tau_positive), log_ratio_T.new_full((), tau_negative)
    tau_T = torch.where(advantages_T > 0, positive, negative)
    clamped_T = clamped(log_ratio_T, log_clamp)
    with torch.no_grad():
        saturated_T = clamped_T > torch.log1p(SATURATED / tau_T)
        silent_T = saturated_T | (advantages_T == 0)
    ratio_T = torch.exp(torch.where(silent_T, 0.0, clamped_T))
    gate_T = torch.where(saturated_T, 1.0, torch.sigmoid(tau_T * (ratio_T - 1)))
    values_T = -(4 / tau_T) * gate_T * advantages_T
    return Term(values_T, silent_T=None if log_clamp is None else (advantages_T == 0) | (clamped_T != log_ratio_T))


def dro(inputs: LossInputs, *, beta: float = 0.1, anchor: str = "old") -> Term:
    """Direct reward optimisation: a policy gradient and a quadratic penalty on the distance from the anchor.

    Formula:  d = l - anchor;  value = -(A l - beta d^2 / 2)
    Shapes:   [T] -> [T]. The value is not comparable with a ratio's.
    Backward: -A + beta d.
    Source:   DRO, arXiv 2405.19107; the token-level form is that of verl's "dro".
    Differs:  the paper's baseline is a learned value of the prompt and its penalty is per document; here both are per
              token, and the advantages come with the batch.
    """
    advantages_T, log_ratio_T = inputs.counted_advantages_T, inputs.log_ratio(anchor)
    return Term(
        -advantages_T * inputs.counted_logprobs_T + 0.5 * beta * log_ratio_T**2,
        silent_T=-advantages_T + beta * log_ratio_T.detach() == 0,
    )
