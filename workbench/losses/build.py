"""From a spec to a loss: surrogate times correction, then the penalties, each a term of its own name.

    policy       coefficient * correction weight * surrogate
    kl           coefficient * estimate of the KL divergence
    entropy      coefficient * minus the entropy
    logit        coefficient * squared log normaliser
    logit_size   coefficient * mean over the vocabulary of the squared logits
    positive_nll coefficient * negative log-likelihood of rewarded documents

A term whose coefficient is 0 is absent. The result is a function from `LossInputs` to terms, like a hand-written loss.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.corrections import apply_correction, correct, log_document_weight
from workbench.losses.entropy import entropy_bonus, mean_squared_logit, squared_logit
from workbench.losses.kl import kl_term
from workbench.losses.selection import highest_entropy, restricted_to
from workbench.losses.sequence import log_sequence_ratio
from workbench.losses.supervised import positive_nll
from workbench.losses.surrogates import SURROGATES
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.specs.losses import LossSpec


def make_loss(spec: LossSpec) -> Loss:
    """Build the pure loss that a spec describes.

    Example:
        >>> import torch
        >>> loss = make_loss(LossSpec(name="reinforce"))
        >>> loss(LossInputs(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2.0])))["policy"].values_T
        tensor([2.])
    """
    surrogate = functools.partial(SURROGATES[spec.surrogate.kind], **spec.surrogate.parameters)

    def loss(inputs: LossInputs) -> dict[str, Term]:
        inputs = prepare_inputs(inputs, spec)
        sequence_inputs = {}
        if spec.correction.enters == "sequence_weight":
            sequence_inputs["log_correction_T"] = log_document_weight(inputs, spec.correction)
        policy = replace(
            surrogate(surrogate_inputs(inputs, spec), **sequence_inputs), coefficient=spec.surrogate.coefficient
        )
        policy = apply_correction(policy, inputs, spec.correction)
        chosen_T = None if spec.top_entropy_share == 1 else highest_entropy(inputs, spec.top_entropy_share)
        terms = {"policy": policy if chosen_T is None else restricted_to(policy, inputs, chosen_T)}
        if spec.kl.coefficient and spec.kl.placement == "loss":
            terms["kl"] = kl_term(inputs, spec.kl)
        if spec.entropy_coefficient:
            terms["entropy"] = entropy_bonus(
                inputs, spec.entropy_coefficient, denominator=spec.entropy_denominator, chosen_T=chosen_T
            )
        if spec.squared_logit_coefficient:
            terms["logit"] = squared_logit(inputs, coefficient=spec.squared_logit_coefficient)
        if spec.mean_squared_logit_coefficient:
            terms["logit_size"] = mean_squared_logit(inputs, coefficient=spec.mean_squared_logit_coefficient)
        if spec.positive_nll_coefficient:
            terms["positive_nll"] = positive_nll(inputs, coefficient=spec.positive_nll_coefficient)
        return terms

    return loss


def prepare_inputs(inputs: LossInputs, spec: LossSpec) -> LossInputs:
    """Prepare the inputs of every term of a spec; the metrics of a step must use the same ones.

    Formula:  old_policy "current": ``old = sg[policy]``; scaling.mean_epsilon: added to lengths under document means.
    Backward: the policy's own, nothing through ``old``.
    """
    if spec.old_policy == "current":
        inputs = replace(inputs, old_logprobs_T=inputs.policy_logprobs_T.detach())
    if spec.scaling.mean_epsilon:
        inputs = replace(inputs, length_epsilon=spec.scaling.mean_epsilon)
    return inputs


def surrogate_inputs(inputs: LossInputs, spec: LossSpec) -> LossInputs:
    """Prepare the inputs of the surrogate alone: the signal that multiplies its ratio, and the tokens of each document.

    Formula:  signal "rewards": ``A = reward of the document``; signal_floor: ``A = max(A, signal_floor)``;
              correction.surrogate_over "kept": means over a document run over the tokens that the correction keeps
    Raises:   SpecError: signal "rewards", and the batch has none.
    """
    if spec.signal == "rewards":
        if inputs.rewards_T is None:
            raise SpecError(
                "signal = 'rewards'",
                found="no rewards",
                rule="the surrogate is driven by each document's reward",
                fix="give the batch rewards, or drive it by advantages",
            )
        inputs = replace(inputs, advantages_T=inputs.rewards_T)
    if spec.signal_floor is not None:
        inputs = replace(inputs, advantages_T=inputs.advantages_T.clamp_min(spec.signal_floor))
    if spec.correction.surrogate_over == "kept":
        kept_T = correct(inputs, spec.correction).kept_T
        inputs = replace(
            inputs,
            loss_mask_T=kept_T,
            lengths_T=inputs.document_sums.document(kept_T.double()),
            sums=inputs.document_sums,
        )
    return inputs


def surrogate_ratio(inputs: LossInputs, spec: LossSpec) -> Tensor:
    """[T] ratio that the surrogate of a spec uses: the token's, or its document's or segment's geometric mean.

    0 where nothing counts. Before any clip.

    Backward: none.
    """
    with torch.no_grad():
        inputs = surrogate_inputs(prepare_inputs(inputs, spec), spec)
        surrogate = spec.surrogate
        level, anchor = surrogate.ratio_level, surrogate.ratio_anchor
        log_T = inputs.log_ratio(anchor) if level == "token" else log_sequence_ratio(inputs, level, anchor)
        return torch.where(inputs.counts_T, log_T.exp(), 0.0)
