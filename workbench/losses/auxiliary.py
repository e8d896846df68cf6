"""Losses beside a policy's: a critic's, and divergences of whole distributions from a target.

A critic's loss is the distance of its value of a state from the return that followed. A divergence imitates a label, a
teacher's logits or its probabilities; it needs every logit of a token, so it takes logits.

Letters: T packed tokens | V vocabulary. For a critic V value, R return, u = V - R; for a divergence p of the logits,
q of the target, both after their scales.
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
              value = e(V - R);  with a clip: ``max(e(V - R), e(clamp(V, old - clip, old + clip) - R))``, old the
              prediction at the start of the update
    Shapes:   [T] each -> a term of [T], in squared reward units (huber: times delta beyond it); 0 where nothing counts.
    Backward: to the values: e'(u), u or its sign times delta; 0 where V is further than clip from old and the clipped
              error is the greater. ``clipped_T``: the clipped error is the greater.
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


DIVERGENCES = ("cross_entropy", "forward_kl", "reverse_kl")
TARGETS = ("labels", "logits", "probabilities")


def divergence(
    logits_TV: Tensor,
    target: Tensor,
    *,
    kind: Literal["cross_entropy", "forward_kl", "reverse_kl"] = "cross_entropy",
    target_format: Literal["labels", "logits", "probabilities"] = "labels",
    loss_mask_T: Tensor | None = None,
    logit_scale: float = 1.0,
    target_scale: float = 1.0,
    label_floor: float = 0.0,
) -> Term:
    """Divergence of the policy's distribution from a target's, per token.

    Formula:  log p = log_softmax(logit_scale * logits)
              q: 1 at the label, plus label_floor everywhere (not normalised again) | softmax(target_scale * logits) |
              the probabilities as given
              cross_entropy = -sum_v q log p;  forward_kl = sum_v q (log q - log p)
              reverse_kl = sum_v p (log p - log q)
    Shapes:   logits_TV [T, V], target [T] labels or [T, V] -> a term of [T] nats, summed with the weights "token"; 0
              where the label is negative or the mask is False.
    Backward: to the logits alone: logit_scale * (p sum_v q - q), and logit_scale * p (log p - log q - reverse_kl).
    Raises:   SpecError: another kind or format; a reverse KL from labels without a floor, which is infinite.
    Source:   forward and reverse: Hinton et al., arXiv 1503.02531; MiniLLM, arXiv 2306.08543. The floor of 1e-10
              under labels is that of ServiceNow/Fast-LLM (functional/entropy_loss.py, 7d61a1ba), whose scales are
              logits_scale_factor and logits_scale_factor / temperature.
    """
    if kind not in DIVERGENCES or target_format not in TARGETS:
        raise SpecError(
            f"divergence(kind={kind!r}, target_format={target_format!r})",
            rule=f"kind is one of {', '.join(DIVERGENCES)}, target_format one of {', '.join(TARGETS)}",
            fix="correct the setting",
        )
    if kind == "reverse_kl" and target_format == "labels" and not label_floor > 0:
        raise SpecError(
            "a reverse KL from labels",
            found=f"label_floor = {label_floor}",
            rule="a label gives every other token probability 0, and the divergence is infinite",
            fix="take forward_kl, or a small label_floor",
        )
    target = target.detach()
    if target_format == "labels":
        check_shapes("divergence", logits_TV=logits_TV, target_T=target, loss_mask_T=loss_mask_T)
        labelled_T = target >= 0
        counts_T = labelled_T if loss_mask_T is None else labelled_T & loss_mask_T
        hot_TV = torch.zeros_like(logits_TV, requires_grad=False).scatter(1, target.clamp_min(0).long()[:, None], 1.0)
        q_TV = torch.where(labelled_T[:, None], hot_TV, 0.0) + label_floor
        log_q_TV = q_TV.log()
    else:
        check_shapes("divergence", logits_TV=logits_TV, target_TV=target, loss_mask_T=loss_mask_T)
        counts_T = torch.ones_like(target[:, 0], dtype=torch.bool) if loss_mask_T is None else loss_mask_T
        target_TV = torch.where(counts_T[:, None], target.to(logits_TV.dtype), 1.0)
        log_q_TV = torch.log_softmax(target_scale * target_TV, -1) if target_format == "logits" else target_TV.log()
        q_TV = log_q_TV.exp() if target_format == "logits" else target_TV
    # Values where nothing counts must not reach a gradient: 0 * NaN is NaN.
    log_p_TV = torch.log_softmax(logit_scale * torch.where(counts_T[:, None], logits_TV, 0.0), -1)
    if kind == "reverse_kl":
        values_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
    else:
        values_T = -torch.where(q_TV == 0, 0.0, q_TV * log_p_TV).sum(-1)
        if kind == "forward_kl":
            values_T = values_T + torch.special.xlogy(q_TV, q_TV).sum(-1)
    return Term(torch.where(counts_T, values_T, 0.0), weight="token", silent_T=~counts_T)


def z_loss(logits_TV: Tensor, *, loss_mask_T: Tensor | None = None, logit_scale: float = 1.0) -> Term:
    """Keep the log normaliser near 0, from logits; as a penalty it is `workbench.losses.entropy.squared_logit`.

    Formula:  Z^2, Z = log sum_v exp(logit_scale * logit_v)
    Shapes:   logits_TV [T, V] -> a term of [T] nats squared, summed with the weights "token"; 0 where the mask is
              False.
    Backward: 2 Z logit_scale p.
    Source:   PaLM, arXiv 2204.02311, section 5.
    """
    check_shapes("z_loss", logits_TV=logits_TV, loss_mask_T=loss_mask_T)
    counts_T = torch.ones_like(logits_TV[:, 0], dtype=torch.bool) if loss_mask_T is None else loss_mask_T
    values_T = torch.logsumexp(logit_scale * torch.where(counts_T[:, None], logits_TV, 0.0), -1).square()
    return Term(torch.where(counts_T, values_T, 0.0), weight="token", silent_T=~counts_T)
