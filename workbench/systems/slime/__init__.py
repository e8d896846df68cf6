"""THUDM/slime: losses on packed samples, summed over samples, and divided when the step is known.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from workbench.errors import SpecError
from workbench.losses.kl import kl_term
from workbench.policy.logprobs.reference import support_logits, token_logprobs_from_logits
from workbench.reduction.denominators import length_shares
from workbench.reduction.weights import LOSS_WEIGHTS
from workbench.rollouts.advantages.tokens import gae
from workbench.systems import replays
from workbench.systems.case import Case, flags_of_logits, logprobs_only
from workbench.systems.metrics import PeerSettings, settings_of
from workbench.systems.registry import LOGPROBS, System
from workbench.systems.replays import Replayed, evaluate_case, finish, named_metrics, policy_settings
from workbench.systems.slime import metrics as named
from workbench.systems.slime.advantages import estimator_of
from workbench.systems.slime.dump import read_dump
from workbench.systems.slime.metrics import opsm_clipfrac
from workbench.systems.slime.settings import GAESettings, LogprobSettings, SlimeSettings
from workbench.systems.slime.translate import CONTRACTS, back, micro_batch_sums, translate


def case_settings(case: Case) -> dict[str, Any]:
    """Return the options; the function's name selects the estimator, and a given threshold or estimator is used."""
    estimator = next((name for name in ("gspo", "cispo") if f"compute_{name}" in case.function), "grpo")
    return {
        "advantage_estimator": estimator,
        "use_opsm": case.config.get("opsm_delta") is not None,
        "use_kl_loss": case.config.get("kl_loss_type") is not None,
        **case.config,
    }


def policy_loss(case: Case) -> dict[str, Any]:
    """Replay its policy loss. ``sample_denominators``, one per sample, replace the samples' numbers of trained tokens.

    slime gives all samples of a rollout the trained tokens of the rollout. The ratios of samples and off-policy
    sequence masking still use the sample's own tokens, and a loss per token uses none of this.
    """
    settings = policy_settings(case)
    if case.get("sample_denominators") is None or settings.calculate_per_token_loss:
        return replays.policy_loss(case)
    if settings.advantage_estimator == "gspo" and settings.use_tis:
        raise SpecError(
            "replay of slime's gspo with use_tis and sample_denominators",
            found="ois, a mean over samples of ratios of samples",
            rule="that number is computed here only with the samples' own tokens",
            fix="leave use_tis or sample_denominators out",
        )
    given_T, leaf = case.of_documents("sample_denominators"), case.leaf("logprobs")
    shares_T = length_shares(case.row().lengths_T, given_T)
    head_output = logprobs_only(leaf.reshape(-1), case.tokens("entropies"))
    replayed = evaluate_case(case, head_output, extensions={LOSS_WEIGHTS: shares_T})
    return finish(replace(replayed, inputs=replace(replayed.inputs, lengths_T=given_T)), {"grad_logprobs": leaf})


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Return the settings of metrics: sums of one micro-batch."""
    return settings_of(replayed.translation.spec, replayed.slots)._replace(num_documents=1)


def further_metrics(replayed: Replayed) -> dict[str, float]:
    """Return a KL that is only reported, and the share dropped by off-policy sequence masking, as slime counts it."""
    correction = replayed.translation.spec.correction
    values = _unweighted_kl(replayed)
    if correction.opsm_threshold is not None:
        advantages_T = replayed.case.spread("advantages").reshape(-1)
        inputs = replace(replayed.inputs, lengths_T=replayed.row.lengths_T)
        values["opsm_clipfrac"] = opsm_clipfrac(inputs, advantages_T, correction.opsm_threshold, correction.opsm_anchor)
    return values


def _unweighted_kl(replayed: Replayed) -> dict[str, float]:
    """Return kl_loss if use_kl_loss has the coefficient 0: the loss has no such term, but slime reports it."""
    if not replayed.settings.use_kl_loss or replayed.settings.kl_loss_coef:
        return {}
    spec = translate(replayed.settings.model_copy(update={"kl_loss_coef": 1.0})).spec
    terms = {**replayed.evaluated.terms, "kl": kl_term(replayed.inputs, spec.kl)}
    return {"kl_loss": named_metrics(replayed, peer_settings(replayed), spec, terms)["kl_loss"]}


def logprobs(case: Case) -> dict[str, Any]:
    """Replay log-probabilities of the targets, and entropies."""
    settings, leaf = case.options(LogprobSettings), case.leaf("logits")
    logits_TV, targets_T = leaf.reshape(-1, leaf.shape[-1]), case["targets"].reshape(-1)
    output = raw = token_logprobs_from_logits(logits_TV, targets_T)
    if settings.keep_mask:
        flags = next(iter(flags_of_logits(case)), "keep_mask")  # the input with a flag for every logit
        support_TV = case[flags].reshape(logits_TV.shape).bool()
        output = token_logprobs_from_logits(support_logits(logits_TV, support_TV, targets_T), targets_T)
    assert raw.entropy_T is not None, "the reference returns it by default"
    through, cotangents = [output.logprobs_T], [case["cotangent_logprobs"].reshape(-1)]
    if settings.entropy_grad and case.get("cotangent_entropy") is not None:
        through, cotangents = [*through, raw.entropy_T], [*cotangents, case["cotangent_entropy"].reshape(-1)]
    torch.autograd.backward(through, cotangents)
    return {"logprobs": case.shaped(output.logprobs_T), "entropy": case.shaped(raw.entropy_T), "grad_logits": leaf.grad}


def advantage(case: Case) -> dict[str, Any]:
    """Replay generalised advantage estimation, with every token of a row trained."""
    settings = case.options(GAESettings)
    advantages_T, returns_T = gae(
        case["token_rewards"].reshape(-1),
        case["values"].reshape(-1),
        case.document_ids_T,
        case.loss_mask_T,
        discount=settings.gamma,
        policy_lambda=settings.lam,
    )
    return {"advantages": case.shaped(advantages_T), "returns": case.shaped(returns_T)}


SYSTEM = System(
    name="slime",
    title="slime",
    version="624b824a",
    settings=SlimeSettings,
    translate=translate,
    back=back,
    counts=micro_batch_sums,
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=further_metrics,
    scaling=CONTRACTS,
    replays={
        "policy_loss": policy_loss,
        "policy_loss_packed": policy_loss,
        "logprobs": logprobs,
        "advantage": advantage,
    },
    arrays=(*LOGPROBS, "entropies", "sample_denominators"),
    arrays_of={
        "logprobs": ("logits", "targets", "cotangent_logprobs", "cotangent_entropy", "keep_mask"),
        "advantage": ("token_rewards", "values"),
    },
    aliases=named.names,
    left_out=named.LEFT_OUT,
    estimator=estimator_of,
    read_dump=read_dump,
)
