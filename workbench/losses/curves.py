"""A loss as a function of the ratio: the data of its figures, without the drawing.

Letters: T points of the grid.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.build import make_loss
from workbench.losses.corrections import step_statistics
from workbench.losses.terms import LossInputs
from workbench.specs.losses import LossSpec

NEED_MORE = ("entropy_coefficient", "squared_logit_coefficient", "positive_nll_coefficient")
"""Coefficients of terms that do not depend on the ratio; they are left out."""


def ratio_curves(
    spec: LossSpec, ratios_T: Tensor, advantage: float = 1.0, *, anchor_probability: float | None = None
) -> tuple[Tensor, Tensor]:
    """Loss and gradient coefficient of one token, for each ratio of the policy to the old policy.

    Each point is a document of one token in a micro-batch of its own, so that a sequence ratio is the token's. Old,
    sampler and reference policy are the same; a correction is therefore 1, and a KL term is the distance moved.

    Args:
        spec: any loss except one on pairs. Entropy, squared-logit and likelihood terms are left out.
        ratios_T: [T] above 0.
        advantage: of the token.
        anchor_probability: of the token before it moved; a trust region in probability needs it. None takes 1/2, or
            less if a ratio is larger than 1, so that the policy's probability stays at or below 1/2.

    Returns:
        [T] loss and [T] d loss / d log-probability, float64. Losses of different kinds are not comparable
        (`-A l` is not `-r A`), coefficients are.

    Raises:
        SpecError: a loss on pairs, ratios that are not positive, a probability that leaves (0, 1].

    Example:
        >>> loss, coefficient = ratio_curves(LossSpec(name="grpo"), torch.tensor([1.0, 2.0]))
        >>> coefficient
        tensor([-1.,  0.], dtype=torch.float64)
    """
    if spec.needs_pairs:
        raise SpecError(
            "a curve of dpo over the ratio",
            rule="one token of one document decides the loss",
            fix="choose a loss without pairs",
        )
    ratios_T = ratios_T.double()
    highest = max(1.0, float(ratios_T.max())) if len(ratios_T) else 1.0
    probability = 0.5 / highest if anchor_probability is None else anchor_probability
    if not bool((ratios_T > 0).all()) or not 0 < probability * highest <= 1:
        raise SpecError(
            f"a curve from a probability of {probability:g} up to a ratio of {highest:g}",
            rule="ratios above 0, and no probability above 1",
            fix="lower the ratios or anchor_probability",
        )
    loss = make_loss(spec.model_copy(update=dict.fromkeys(NEED_MORE, 0.0)))
    anchor_T = torch.full_like(ratios_T, probability).log()
    policy_T = (anchor_T + ratios_T.log()).requires_grad_()
    advantages_T = torch.full_like(ratios_T, advantage)
    totals = []
    for point in torch.arange(len(ratios_T)).split(1 if spec.breaks else max(1, len(ratios_T))):
        start_T = anchor_T[point]
        inputs = LossInputs(policy_T[point], start_T, advantages_T[point], start_T, start_T, document_ids_T=point)
        terms = loss(replace(inputs, statistics=step_statistics([inputs], spec.correction)))
        totals.append(sum(term.coefficient * term.values_T for term in terms.values()))
    total_T = torch.cat(totals) if totals else policy_T
    (coefficient_T,) = torch.autograd.grad(total_T.sum(), policy_T)
    return total_T.detach(), coefficient_T
