"""The clipped surrogate of PPO and its upper bounds for negative advantages; the arithmetic of every clipped ratio.

Letters: T packed tokens. r ratio, A advantage.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workbench.losses.terms import LossInputs, Term, clamped


def clipped_surrogate(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    delta: float | None = None,
    log_clamp: float | None = None,
    anchor: str = "old",
) -> Term:
    """The pessimistic surrogate of PPO, per token.

    Formula:  r = exp(clamp(policy - anchor, -log_clamp, log_clamp))
              value = -min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A)
              value = min(value, -dual_clip A) where A < 0
    Shapes:   [T] -> [T].
    Backward: -r A; 0 beyond the bound that the advantage pushes towards (1 + clip_high if A > 0, 1 - clip_low if
              A < 0) and, where A < 0, beyond dual_clip or delta. On a bound the gradient is kept. 0 beyond log_clamp.
    Source:   PPO, arXiv 1707.06347, equation 7; two bounds: DAPO, arXiv 2503.14476, equation 10; dual clip:
              arXiv 1912.09729; delta: INTELLECT-2, arXiv 2505.07291; log_clamp 20: verl and OpenRLHF.
    Differs:  token weights are in `workbench.reduction`.
    """
    log_ratio_T, advantages_T = inputs.log_ratio(anchor), inputs.counted_advantages_T
    clamped_T = clamped(log_ratio_T, log_clamp)
    term = clip_ratio(
        clamped_T,
        advantages_T,
        inputs.frozen_clip_T,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        delta=delta,
    )
    return term if log_clamp is None else replace(term, silent_T=(clamped_T != log_ratio_T) | (advantages_T == 0))


def clip_ratio(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    frozen_clip_T: Tensor | None = None,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Term:
    """Clip any log ratio as `clipped_surrogate` does: a token's, a document's, a straight-through one.

    extras, if dual_clip or delta is set: "dual_clipped", a negative advantage that one of them cut off.

    Each sign of the advantage has at most one bound below and one above, beyond which the value is constant:

        A > 0: above min(1 + clip_high, delta)
        A < 0: below 1 - clip_low; above the smaller of dual_clip and max(delta, 1 + clip_high)

    An advantage of 0 makes a token silent, whatever its ratio. Under frozen decisions the bound of a token still
    follows from its ratio.
    """
    lower, upper = 1 - clip_low, 1 + clip_high
    above_if_positive, bounds_if_negative = upper, [] if dual_clip is None else [dual_clip]
    if delta is not None:
        above_if_positive = min(upper, delta)
        bounds_if_negative.append(max(delta, upper))
    with torch.no_grad():
        positive_T = advantages_T > 0
        bound_T = torch.full_like(log_ratio_T, lower).masked_fill_(positive_T, above_if_positive)
        ratio_T = log_ratio_T.exp()
        clipped_T = (ratio_T - bound_T) * advantages_T > 0
        if bounds_if_negative:
            above = log_ratio_T.new_full((), min(bounds_if_negative))
            bound_T = torch.where(~positive_T & (log_ratio_T > 0), above, bound_T)
            clipped_T = clipped_T | ((advantages_T < 0) & (ratio_T > above))
        if frozen_clip_T is not None:
            clipped_T = frozen_clip_T
    # A token without gradient must not pass through exp: where that overflows, 0 * inf would make its gradient NaN.
    silent_T = clipped_T | (advantages_T == 0)
    ratio_T = torch.exp(log_ratio_T.masked_fill(silent_T, 0.0))
    extras = {"dual_clipped": clipped_T & (advantages_T < 0) & (log_ratio_T.detach() > 0)} if bounds_if_negative else {}
    return Term(torch.where(silent_T, bound_T, ratio_T) * -advantages_T, clipped_T=clipped_T, extras=extras)
