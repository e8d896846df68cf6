"""Losses of a critic: distance of its value of a state from the return that followed.

Letters: T packed tokens. V value, R return, u = V - R.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import Term
from workbench.shapes import check_shapes

KINDS = ("mse", "huber")


def value_loss(
    values_T: Tensor,
    returns_T: Tensor,
    loss_mask_T: Tensor,
    *,
    old_values_T: Tensor | None = None,
    clip: float | None = None,
    kind: Literal["mse", "huber"] = "mse",
    delta: float = 10.0,
) -> Term:
    """Error of a critic per token, pessimistic about its change since the start of the update.

    Formula:  mse: ``e(u) = u^2 / 2``;  huber: the same where ``|u| <= delta``, else ``delta (|u| - delta / 2)``
              value = e(V - R);  with a clip: ``max(e(V - R), e(clamp(V, old - clip, old + clip) - R))``

    Args:
        values_T: [T] predictions of the critic; the only input with a gradient.
        returns_T: [T] targets.
        loss_mask_T: [T] bool, the token counts.
        old_values_T: [T] predictions at the start of the update; only used by a clip.
        clip: largest change of a value from the old one that lowers the loss; None: unlimited.
        kind: the shape of the error.
        delta: huber: error at which the parabola ends.

    Shapes:   [T] each -> a term of [T], in squared reward units (huber: times delta beyond it); 0 where nothing counts.
    Backward: e'(u), u or its sign times delta; 0 where V is further than clip from old and the clipped error is the
              greater. ``clipped_T``: the clipped error is the greater.
    Raises:   SpecError: another kind, a delta or a clip that is not positive, a clip without old values.
    Source:   clip: PPO's code (openai/baselines ppo2, 2017); NeMo-RL MseValueLossFn, OpenRLHF ValueLoss and verl
              compute_value_loss halve the mean as here; huber: AReaL ppo_critic_loss_fn.
    """
    if kind not in KINDS or delta <= 0 or (clip is not None and (clip <= 0 or old_values_T is None)):
        raise SpecError(
            f"value_loss(kind={kind!r}, delta={delta}, clip={clip})",
            found="no old_values_T" if old_values_T is None else "",
            rule=f"kind is one of {', '.join(KINDS)}; delta and clip are positive; a clip needs the old values",
            fix="correct the setting, or pass old_values_T",
        )
    check_shapes(
        "value_loss", values_T=values_T, returns_T=returns_T, loss_mask_T=loss_mask_T, old_values_T=old_values_T
    )
    # Values where nothing counts (NaN, infinity) must not reach a gradient.
    values_T, returns_T = (torch.where(loss_mask_T, given_T, 0.0) for given_T in (values_T, returns_T))
    plain_T = _error(values_T - returns_T, kind, delta)
    silent_T = ~loss_mask_T
    if clip is None or old_values_T is None:
        return Term(plain_T, clipped_T=torch.zeros_like(loss_mask_T), silent_T=silent_T)
    old_values_T = torch.where(loss_mask_T, old_values_T, 0.0)
    bounded_T = values_T.clamp(old_values_T - clip, old_values_T + clip)
    pessimistic_T = _error(bounded_T - returns_T, kind, delta)
    clipped_T = pessimistic_T > plain_T
    return Term(torch.where(clipped_T, pessimistic_T, plain_T), clipped_T=clipped_T.detach(), silent_T=silent_T)


def _error(u_T: Tensor, kind: str, delta: float) -> Tensor:
    if kind == "mse":
        return 0.5 * u_T.square()
    size_T = u_T.abs()
    return torch.where(size_T <= delta, 0.5 * u_T.square(), delta * (size_T - 0.5 * delta))
