"""NVIDIA-NeMo/RL: one clipped loss with many options, supervised and preference losses, advantages, shaped rewards.

Letters: T packed tokens | N documents | P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.kl import kl_in_reward, kl_term
from workbench.losses.preference import document_rewards, pair_losses, pair_weights
from workbench.losses.terms import LossInputs, Term
from workbench.reduction.evaluate import reduce_terms
from workbench.reduction.weights import TokenWeights
from workbench.rollouts.advantages.groups import group_advantages, group_baselines
from workbench.rollouts.advantages.inputs import overlong, stop_properly
from workbench.rollouts.advantages.tokens import gae, spread_rewards, token_rewards, whiten
from workbench.specs.losses import KLSpec, LossSpec
from workbench.systems import replays
from workbench.systems.case import Case, logprobs_only
from workbench.systems.metrics import PeerSettings, settings_of
from workbench.systems.nemo_rl import metrics as named
from workbench.systems.nemo_rl.dump import estimator_of, read_dump
from workbench.systems.nemo_rl.settings import (
    EPSILON,
    IN_REWARD,
    ClippedPGSettings,
    DPOSettings,
    GAESettings,
    GroupSettings,
    KLSettings,
    NLLSettings,
    PreferenceSettings,
    RawRewardSettings,
    ReinforcePlusPlusSettings,
    RewardKLSettings,
    ShapingSettings,
    ValueSettings,
)
from workbench.systems.nemo_rl.translate import CONTRACTS, SCALING, back, counts, translate
from workbench.systems.registry import BATCH, ESTIMATOR, LOGPROBS, VALUES, System, Translation
from workbench.systems.replays import (
    Replayed,
    back_propagate,
    critic_loss,
    evaluate_as,
    evaluate_case,
    finish,
    kl_estimator,
)


def case_settings(case: Case) -> Mapping[str, Any]:
    """Return the options; without rewards there are no rewarded rows to imitate."""
    return case.config if case.get("rewards") is not None else {**case.config, "positive_example_nll_weight": 0.0}


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Return the settings of metrics, which are divided by the global counts."""
    return settings_of(replayed.translation.spec, replayed.slots)._replace(given=counts(replayed.settings))


def further_metrics(replayed: Replayed) -> dict[str, float]:
    """Return the terms of the loss, and the number of rows."""
    metrics = named.of_the_loss(replayed.evaluated.terms, replayed.evaluated.scalars)
    return {**metrics, "num_valid_samples": _sampled_rows(replayed.case)}


def _sampled_rows(case: Case) -> float:
    sampled = case.get("sample_mask")
    return float(case.shape[0] if sampled is None else len(torch.nonzero(sampled)))


def policy_loss(case: Case) -> dict[str, Any]:
    """Replay `ClippedPGLossFn` from log-probabilities.

    If top-k or top-p filters the policy of the ratio, its unfiltered log-probabilities come as ``logprobs_unfiltered``:
    the KL penalty, with its weight, is of those, and has a gradient of its own.
    """
    if case.get("logprobs_unfiltered") is None:
        return replays.policy_loss(case)
    leaf, raw_leaf = case.leaf("logprobs"), case.leaf("logprobs_unfiltered")
    replayed = evaluate_case(case, logprobs_only(leaf.reshape(-1)))
    if "kl" not in replayed.evaluated.terms:  # without a penalty in the loss NeMo-RL does not read them, either
        return finish(replayed, {"grad_logprobs": leaf})
    row = replayed.row
    unfiltered_T = torch.where(row.loss_mask_T, raw_leaf.reshape(-1), row.old_logprobs_T)
    penalty = kl_term(replace(replayed.inputs, policy_logprobs_T=unfiltered_T), replayed.translation.spec.kl)
    terms = {**replayed.evaluated.terms, "kl": penalty}
    evaluated = replayed.evaluated._replace(terms=terms, scalars=reduce_terms(terms, replayed.weights, row.loss_mask_T))
    return finish(replace(replayed, evaluated=evaluated), {"grad_logprobs": leaf, "grad_logprobs_unfiltered": raw_leaf})


def nll(case: Case) -> dict[str, Any]:
    """Replay `NLLLossFn`: the mean over tokens."""
    settings, leaf = case.options(NLLSettings), case.leaf("logprobs")
    translation = Translation(LossSpec(name="sft", compat={"scaling": SCALING}))
    replayed = evaluate_as(case, logprobs_only(leaf.reshape(-1)), settings, translation, counts(settings))
    outputs = back_propagate(replayed.total, {"grad_logprobs": leaf})
    metrics = {
        "loss": float(outputs["loss"]),
        "num_unmasked_tokens": float(len(torch.nonzero(case.loss_mask_T))),
        "num_valid_samples": _sampled_rows(case),
    }
    return {**outputs, "metrics": metrics}


def preference(case: Case) -> dict[str, Any]:
    """Replay `PreferenceLossFn`: rewards of a reward model."""
    settings, leaf = case.options(PreferenceSettings), case.leaf("rewards")
    rewards_N = leaf.reshape(-1)
    terms = {"preference": Term(pair_losses(rewards_N[::2], rewards_N[1::2]))}
    return _of_pairs(case, settings, rewards_N, terms, {"grad_rewards": leaf})


def dpo(case: Case) -> dict[str, Any]:
    """Replay `DPOLossFn`: implied rewards, and optionally the likelihood of the chosen rows."""
    settings, leaf = case.options(DPOSettings), case.leaf("logprobs")
    size, sampled_T = case.shape[0], case.loss_mask_T
    # Implied rewards include the tokens of rows that the sample mask excludes.
    tokens_T = case["mask"].reshape(-1).bool()
    ref_T = torch.where(tokens_T, case["ref_logprobs"].reshape(-1), torch.zeros_like(leaf.reshape(-1)))
    inputs = LossInputs(
        leaf.reshape(-1), ref_T, ref_T, ref_logprobs_T=ref_T, loss_mask_T=tokens_T, document_ids_T=case.document_ids_T
    )
    rewards_N = document_rewards(inputs, size, average=settings.preference_average_log_probs)
    likelihoods_N = document_rewards(
        replace(inputs, loss_mask_T=sampled_T), size, against=None, average=settings.sft_average_log_probs
    )
    losses_P = pair_losses(rewards_N[::2], rewards_N[1::2], beta=settings.reference_policy_kl_penalty)
    terms = {
        "preference": Term(losses_P, settings.preference_loss_weight),
        "sft": Term(likelihoods_N[::2], -settings.sft_loss_weight),
    }
    return _of_pairs(case, settings, rewards_N, terms, {"grad_logprobs": leaf})


def _of_pairs(
    case: Case,
    settings: PreferenceSettings,
    rewards_N: Tensor,
    terms: Mapping[str, Term],
    leaves: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Reduce terms of pairs: the sum over pairs whose chosen row counts, divided by all pairs of the batch."""
    sampled = case.get("sample_mask")
    sampled_N = torch.ones_like(rewards_N, requires_grad=False) if sampled is None else sampled.double()
    pairs = None if settings.global_valid_seqs is None else settings.global_valid_seqs / 2
    chosen_P, rejected_P = (pair_weights(sampled_N[at::2], pairs=pairs, epsilon=EPSILON) for at in (0, 1))
    scalars = reduce_terms(terms, {"policy": TokenWeights(chosen_P, chosen_P)}, sampled_N[::2].bool())
    metrics = named.of_pairs(terms, scalars, rewards_N, chosen_P, rejected_P)
    metrics["num_valid_samples"] = len(torch.nonzero(sampled_N)) / 2
    return {**back_propagate(scalars["total"].value, leaves), "metrics": metrics}


def value(case: Case) -> dict[str, Any]:
    """Replay `MseValueLossFn`: the critic's error."""
    settings, spec = case.options(ValueSettings), LossSpec(compat={"scaling": SCALING})
    clip = settings.cliprange or None
    outputs, term = critic_loss(case, spec, counts(settings), coefficient=settings.scale, clip=clip)
    values_T, returns_T = case["values"].reshape(-1), case["returns"].reshape(-1)
    measured = named.of_values(term, values_T, returns_T, case.loss_mask_T, settings.global_valid_toks)
    more = {"loss": float(outputs["loss"]), "num_valid_samples": float(case.shape[0])}
    return {**outputs, "metrics": measured | more}


def kl(case: Case) -> dict[str, Any]:
    """Replay `calculate_kl`, without importance weights."""
    settings = case.options(KLSettings)
    clamps = {"input_clamp": settings.input_clamp_value, "output_clamp": settings.output_clamp_value}
    return kl_estimator(case, LossSpec(kl={"coefficient": 1.0, "estimator": settings.kl_type, **clamps}))


def advantage(case: Case) -> dict[str, Any]:
    """Replay an advantage estimator, by the name of its class."""
    estimate = ESTIMATORS.get(case.function.partition(".")[0])
    if estimate is None:
        raise SpecError(
            f"advantages of NeMo-RL by {case.function!r}",
            rule=f"one of {', '.join(ESTIMATORS)}",
            fix="choose one of them",
        )
    return estimate(case)


def _group(case: Case) -> dict[str, Any]:
    settings, rewards_N, groups_N = case.options(GroupSettings), case["rewards"], case["group_ids"]
    one_out = settings.use_leave_one_out_baseline
    baseline: Literal["leave_one_out", "mean"] = "leave_one_out" if one_out else "mean"
    scale: Literal["none", "leave_one_out_std", "std"]
    scale = "none" if not settings.normalize_rewards else "leave_one_out_std" if one_out else "std"
    baseline_N, deviation_N = group_baselines(rewards_N, groups_N, baseline=baseline)
    advantages_N = group_advantages(rewards_N, groups_N, baseline=baseline, scale=scale, epsilon=1e-6)
    return {"advantages": advantages_N, "baseline": baseline_N, "std": deviation_N}


def _reinforce_plus_plus(case: Case) -> dict[str, Any]:
    settings, rewards_N = case.options(ReinforcePlusPlusSettings), case["rewards"]
    if settings.minus_baseline:
        rewards_N = group_advantages(rewards_N, case["group_ids"], scale="none")
    # NeMo-RL penalises and whitens tokens that do not count, too.
    everywhere_T = torch.ones_like(case.loss_mask_T)
    spread_T = spread_rewards(rewards_N, case.document_ids_T, _penalties(case, settings, everywhere_T))
    return {"advantages": case.shaped(_whitened(case, spread_T))}


def _raw_reward(case: Case) -> dict[str, Any]:
    settings = case.options(RawRewardSettings)
    spread_T = spread_rewards(case["rewards"], case.document_ids_T)
    return {"advantages": case.shaped(_whitened(case, spread_T) if settings.normalize_advantages else spread_T)}


def _whitened(case: Case, values_T: Tensor) -> Tensor:
    return whiten(values_T, case.loss_mask_T, ddof=0, epsilon=1e-8, epsilon_form="floor", elsewhere="whiten")


def _gae(case: Case) -> dict[str, Any]:
    settings, mask_T, ids_T = case.options(GAESettings), case.loss_mask_T, case.document_ids_T
    rewards_T = token_rewards(case["rewards"], ids_T, mask_T, _penalties(case, settings, mask_T))
    policy_lambda = settings.gae_lambda if settings.gae_lambda_policy is None else settings.gae_lambda_policy
    value_lambda = settings.gae_lambda if settings.gae_lambda_value is None else settings.gae_lambda_value
    advantages_T, returns_T = gae(
        rewards_T,
        case["values"].reshape(-1),
        ids_T,
        mask_T,
        discount=settings.gae_gamma,
        policy_lambda=policy_lambda,
        value_lambda=value_lambda,
        length_adaptive_alpha=settings.length_adaptive_alpha or None,
        elsewhere="carry",
    )
    if settings.normalize_advantages:
        advantages_T = whiten(advantages_T, mask_T, count_epsilon=EPSILON)
    advantages_T = torch.where(mask_T, advantages_T, torch.zeros_like(advantages_T))
    return {"advantages": case.shaped(advantages_T), "returns": case.shaped(returns_T)}


def _penalties(case: Case, settings: RewardKLSettings, where_T: Tensor) -> Tensor | None:
    if settings.kl_in_reward is None:
        return None
    spec = KLSpec(coefficient=settings.kl_coef, estimator=settings.kl_in_reward, placement="reward", **IN_REWARD)
    return kl_in_reward(case["logprobs"].reshape(-1), case["ref_logprobs"].reshape(-1), where_T, spec)


ESTIMATORS = {
    "GRPOAdvantageEstimator": _group,
    "ReinforcePlusPlusAdvantageEstimator": _reinforce_plus_plus,
    "GeneralizedAdvantageEstimator": _gae,
    "RawRewardAdvantageEstimator": _raw_reward,
}
"""Class -> its replay."""


def reward_shaping(case: Case) -> dict[str, Any]:
    """Replay `apply_reward_shaping`."""
    settings, rewards_N = case.options(ShapingSettings), case["rewards"]
    coefficient, longest = settings.stop_properly_penalty_coef, settings.max_response_length
    buffer, penalty = settings.overlong_buffer_length, settings.overlong_buffer_penalty
    if not settings.enabled:
        return {"rewards": rewards_N}
    if coefficient is not None:
        return {"rewards": stop_properly(rewards_N, case["truncated"].bool(), coefficient=coefficient)}
    if longest is None or buffer is None or penalty is None:
        raise SpecError(
            "reward shaping of NeMo-RL",
            found="no stop_properly_penalty_coef, not all overlong options",
            rule="overlong_buffer_length, overlong_buffer_penalty and max_response_length go together",
            fix="give all three",
        )
    shaped_N = overlong(rewards_N, case["response_lengths"], max_length=longest, buffer=buffer, penalty=penalty)
    return {"rewards": shaped_N}


SYSTEM = System(
    name="nemo_rl",
    title="NeMo-RL",
    version="7ea279ab (2026-08-22)",
    settings=ClippedPGSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=further_metrics,
    replays={
        "policy_loss": policy_loss,
        "policy_loss_packed": policy_loss,
        "nll": nll,
        "dpo": dpo,
        "preference": preference,
        "value_loss": value,
        "kl_estimator": kl,
        "advantage": advantage,
        "reward_shaping": reward_shaping,
    },
    arrays=(*LOGPROBS, "sample_mask", "rewards", "logprobs_unfiltered"),
    arrays_of={
        "nll": (*BATCH, "sample_mask"),
        "dpo": (*BATCH, "sample_mask"),
        "preference": ("rewards", "sample_mask"),
        "value_loss": (*VALUES, "sample_mask"),
        "kl_estimator": ESTIMATOR,
        "advantage": (*BATCH, "rewards", "group_ids", "values", "sample_mask"),
        "reward_shaping": ("rewards", "response_lengths", "truncated"),
    },
    aliases=named.names,
    left_out=named.LEFT_OUT,
    estimator=estimator_of,
    read_dump=read_dump,
)
