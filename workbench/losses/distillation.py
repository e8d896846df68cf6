"""Losses between a target distribution and logits: imitate a label, a teacher's logits or its probabilities.

Unlike the losses of `workbench.losses.surrogates` these need every logit of a token, so they take logits.

Letters: T tokens | V vocabulary. p of the logits, q of the target, both after their scales.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import Term
from workbench.shapes import check_shapes

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
