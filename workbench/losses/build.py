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
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.clipped import clipped_surrogate
from workbench.losses.corrections import apply_correction, correct, log_document_weight, step_statistics
from workbench.losses.covariance import clip_cov, kl_cov
from workbench.losses.direct import cispo, gpg, importance_sampling, on_policy, positive_nll, reinforce, sft
from workbench.losses.entropy import entropy_bonus, highest_entropy, mean_squared_logit, restricted_to, squared_logit
from workbench.losses.kl import kl_term
from workbench.losses.own import TrainerLoss, load_own, own_terms
from workbench.losses.preference import dpo
from workbench.losses.sequence import gmpo, gspo, gspo_token, log_sequence_ratio, luspo, vespo
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.losses.trust_region import dppo_kl, dppo_tv, dro, ipo, ref_kl, sapo
from workbench.specs.losses import LossSpec
from workbench.specs.losses.own import OwnLoss

SURROGATES: Mapping[str, Callable[..., Term]] = {
    "ppo": clipped_surrogate,
    "importance_sampling": importance_sampling,
    "reinforce": reinforce,
    "on_policy": on_policy,
    "cispo": cispo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": luspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "vespo": vespo,
    "gpg": gpg,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "ipo": ipo,
    "ref_kl": ref_kl,
    "dro": dro,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "sft": sft,
    "dpo": dpo,
}
"""Kind -> its function, whose keyword parameters are the settings of that kind in `workbench.specs.losses`."""


def build_loss(spec: LossSpec, project: Path | None = None) -> Loss:
    """Build the pure loss that a spec describes.

    A function of a file (`workbench.losses.own`) is loaded here; its relative path begins at ``project``, or else at
    the current folder. A trainer's function gives a `TrainerLoss`.

    Raises:
        SpecError: a file or function that does not exist, cannot be executed, or does not have the settings.

    Example:
        >>> import torch
        >>> loss = build_loss(LossSpec(name="reinforce"))
        >>> loss(LossInputs(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([2.0])))["policy"].values_T
        tensor([2.])
    """
    if isinstance(spec.surrogate, OwnLoss):
        own = load_own(spec.surrogate, project or Path.cwd())
        if spec.surrogate.engine is not None:
            return TrainerLoss(own, spec.surrogate.engine)
        surrogate = functools.partial(_own_surrogate, own, spec.surrogate.function)
    else:
        surrogate = functools.partial(_named_surrogate, SURROGATES[spec.surrogate.kind], spec.surrogate.parameters)

    def loss(inputs: LossInputs) -> dict[str, Term]:
        inputs = prepare_inputs(inputs, spec)
        enters = spec.correction.enters == "sequence_weight"
        weight = {"log_correction_T": log_document_weight(inputs, spec.correction)} if enters else {}
        chosen_T = None if spec.top_entropy_share == 1 else highest_entropy(inputs, spec.top_entropy_share)
        terms = surrogate(surrogate_inputs(inputs, spec), **weight)
        if (policy := terms.get("policy")) is not None:
            policy = replace(policy, coefficient=policy.coefficient * spec.surrogate.coefficient)
            policy = apply_correction(policy, inputs, spec.correction)
            terms["policy"] = policy if chosen_T is None else restricted_to(policy, inputs, chosen_T)
        if spec.kl.coefficient and spec.kl.placement == "loss":
            kl, own = kl_term(inputs, spec.kl), spec.compat.kl_denominator
            terms["kl"] = kl if own == "penalty" else replace(kl, weight=own)
        if spec.entropy_coefficient:
            terms["entropy"] = entropy_bonus(
                inputs, spec.entropy_coefficient, denominator=spec.compat.entropy_denominator, chosen_T=chosen_T
            )
        if spec.squared_logit_coefficient:
            terms["logit"] = squared_logit(inputs, coefficient=spec.squared_logit_coefficient)
        if spec.mean_squared_logit_coefficient:
            terms["logit_size"] = mean_squared_logit(inputs, coefficient=spec.mean_squared_logit_coefficient)
        if spec.positive_nll_coefficient:
            terms["positive_nll"] = positive_nll(inputs, coefficient=spec.positive_nll_coefficient)
        return terms

    return loss


def _named_surrogate(
    surrogate: Callable[..., Term], parameters: Mapping[str, Any], inputs: LossInputs, **weight: Tensor
) -> dict[str, Term]:
    return {"policy": surrogate(inputs, **parameters, **weight)}


def _own_surrogate(function: Callable[[LossInputs], Any], name: str, inputs: LossInputs) -> dict[str, Term]:
    """Terms of a user's function; the names of the penalties, which a spec adds, are taken."""
    terms = own_terms(function(inputs), inputs, name)
    if taken := [term for term in PENALTIES if term in terms]:
        raise SpecError(
            f"loss.name = {name!r}",
            found=f"a term named {taken[0]!r}",
            rule=f"{', '.join(PENALTIES)} are terms that loss.kl and the coefficients of a spec add",
            fix=f"name it otherwise, such as own_{taken[0]}",
        )
    return terms


PENALTIES = ("kl", "entropy", "logit", "logit_size", "positive_nll")
"""Names of the terms that a spec adds to its surrogate."""


def prepare_inputs(inputs: LossInputs, spec: LossSpec) -> LossInputs:
    """Prepare the inputs of every term of a spec; the metrics of a step must use the same ones.

    Formula:  old_policy "current": ``old = sg[policy]``; "interpolated": ``old = (1 - a) sampler + a sg[policy]`` in
              logs, a = s / (s + 1) for weights that are s steps older; compat.scaling.mean_epsilon: added to lengths
              of means.
    Backward: the policy's own, nothing through ``old``.
    Source:   interpolation: AReaL, `prox_logp_method: loglinear` (docs/algorithms/prox_approx.md), where the policy
              that is trained is one version ahead of the old one.
    """
    if spec.old_policy == "current":
        inputs = replace(inputs, old_logprobs_T=inputs.policy_logprobs_T.detach())
    if spec.old_policy == "interpolated":
        share_T = (inputs.ages_T / (inputs.ages_T + 1)).to(inputs.policy_logprobs_T.dtype)
        sampler_T = inputs.logprobs("sampler")
        inputs = replace(inputs, old_logprobs_T=torch.lerp(sampler_T, inputs.policy_logprobs_T.detach(), share_T))
    if spec.compat.scaling.mean_epsilon:
        inputs = replace(inputs, length_epsilon=spec.compat.scaling.mean_epsilon)
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
        inputs = inputs.counting(correct(inputs, spec.correction).kept_T)
    return inputs


def surrogate_ratio(inputs: LossInputs, spec: LossSpec) -> Tensor:
    """[T] ratio that the surrogate of a spec uses: the token's, or its document's or segment's geometric mean.

    0 where nothing counts. Before any clip.

    Backward: none.
    """
    with torch.no_grad():
        inputs = surrogate_inputs(prepare_inputs(inputs, spec), spec)
        log_T = log_sequence_ratio(inputs, spec.surrogate.ratio_level, spec.surrogate.ratio_anchor)
        return torch.where(inputs.counts_T, log_T.exp(), 0.0)


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
    loss = build_loss(spec.model_copy(update=dict.fromkeys(NEED_MORE, 0.0)))
    anchor_T = torch.full_like(ratios_T, probability).log()
    policy_T = (anchor_T + ratios_T.log()).requires_grad_()
    advantages_T = torch.full_like(ratios_T, advantage)
    totals = []
    for point in torch.arange(len(ratios_T)).split(1 if spec.breaks else max(1, len(ratios_T))):
        start_T = anchor_T[point]
        inputs = LossInputs(policy_T[point], start_T, advantages_T[point], start_T, start_T, document_ids_T=point)
        terms = loss(replace(inputs, statistics=step_statistics([inputs], spec.correction)))
        values = (term.coefficient * term.values_T for term in terms.values())
        totals.append(sum(values, torch.zeros_like(start_T)))
    total_T = torch.cat(totals) if totals else policy_T
    (coefficient_T,) = torch.autograd.grad(total_T.sum(), policy_T)
    return total_T.detach(), coefficient_T
