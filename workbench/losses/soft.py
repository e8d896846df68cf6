"""Surrogates that reduce the ratio's gradient smoothly where others clip it.

Letters: T packed tokens. l log-probability of the policy, d log ratio, r ratio, A advantage.
"""

from __future__ import annotations

import torch

from workbench.losses.clipped import clamp_log_ratio
from workbench.losses.sequence import advantages_at, log_sequence_ratio
from workbench.losses.terms import LossInputs, Term

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
    log_ratio_T = inputs.log_ratio(anchor) if level == "token" else log_sequence_ratio(inputs, level, anchor)
    positive, negative = log_ratio_T.new_full((), tau_positive), log_ratio_T.new_full((), tau_negative)
    tau_T = torch.where(advantages_T > 0, positive, negative)
    clamped_T = clamp_log_ratio(log_ratio_T, log_clamp)
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
