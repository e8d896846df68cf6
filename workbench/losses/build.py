"""From a spec to a loss: surrogate times correction, then the penalties, each a term of its own name.

    policy       coefficient * correction weight * surrogate
    kl           coefficient * estimate of the KL divergence
    entropy      coefficient * minus the entropy
    logit        coefficient * squared log normaliser
    positive_nll coefficient * negative log-likelihood of rewarded documents

A term whose coefficient is 0 is absent. What comes out is a function from `LossInputs` to terms, as one that is
written by hand.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from workbench.losses.corrections import apply_correction
from workbench.losses.entropy import entropy_bonus, squared_logit
from workbench.losses.kl import kl_term
from workbench.losses.spec import LossSpec
from workbench.losses.supervised import positive_nll
from workbench.losses.surrogates import SURROGATES
from workbench.losses.terms import Loss, LossInputs, Term


def make_loss(spec: LossSpec) -> Loss:
    """The pure loss that a spec describes.

    Example:
        >>> import torch
        >>> loss = make_loss(LossSpec(name="reinforce"))
        >>> loss(LossInputs(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2.0])))["policy"].values_T
        tensor([2.])
    """
    surrogate = functools.partial(SURROGATES[spec.surrogate.kind], **spec.surrogate.parameters)

    def loss(inputs: LossInputs) -> dict[str, Term]:
        policy = replace(surrogate(inputs), coefficient=spec.surrogate.coefficient)
        terms = {"policy": apply_correction(policy, inputs, spec.correction)}
        if spec.kl.coefficient and spec.kl.placement == "loss":
            terms["kl"] = kl_term(inputs, spec.kl)
        if spec.entropy_coefficient:
            terms["entropy"] = entropy_bonus(inputs, coefficient=spec.entropy_coefficient)
        if spec.squared_logit_coefficient:
            terms["logit"] = squared_logit(inputs, coefficient=spec.squared_logit_coefficient)
        if spec.positive_nll_coefficient:
            terms["positive_nll"] = positive_nll(inputs, coefficient=spec.positive_nll_coefficient)
        return terms

    return loss
