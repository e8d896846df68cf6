"""NVIDIA-NeMo/RL: one clipped loss with many options, supervised and preference losses, advantages, shaped rewards.

Letters: T packed tokens | N documents | P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.kl import kl_in_reward, kl_term
from workbench.losses.preference import document_rewards, pair_losses, pair_weights
from workbench.losses.terms import LossInputs, Term
from workbench.losses.value import value_loss
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import TokenWeights, step_weights
from workbench.rollouts.advantages.groups import group_advantages, group_baselines
from workbench.rollouts.advantages.tokens import gae, spread_rewards, token_rewards, whiten
from workbench.rollouts.rewards import overlong, stop_properly
from workbench.specs.losses import KLSpec, LossSpec, ScalingSpec
from workbench.systems import replays
from workbench.systems.back import checked_back
from workbench.systems.case import Case, silent
from workbench.systems.contracts import CONTRACTS
from workbench.systems.metrics import nemo_rl as named
from workbench.systems.metrics.alias import PeerSettings, settings_of
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, evaluate_as, evaluate_case, finish, kl_estimator

EPSILON = 1e-8
"""Added to every count that divides."""
IN_REWARD = {"input_clamp": 20.0, "output_clamp": 10.0}
"""Bounds of a KL penalty in the reward, whatever the options for the loss say."""


class ClippedPGSettings(Settings):
    """`ClippedPGLossConfig` (nemo_rl/algorithms/loss/loss_functions.py, 7ea279ab)."""

    disable_ppo_ratio: bool = False
    """Multiply advantages with log-probabilities in place of ratios."""
    token_level_loss: bool = True
    """Mean over tokens; False: over rows, of the row's mean over tokens."""
    sequence_level_importance_ratios: bool = False
    """One ratio a row, and one correction weight a row: the ratio is a geometric mean, the weight a product."""
    ratio_clip_min: float = 0.2
    """Length of the clip below 1."""
    ratio_clip_max: float = 0.2
    """Length of the clip above 1."""
    ratio_clip_c: float | None = Field(None, gt=1)
    """Dual clip; None: none."""
    reference_policy_kl_penalty: float = Field(0.01, ge=0)
    """Coefficient of the KL penalty."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Its estimator; the error metrics take it too."""
    kl_input_clamp_value: float | None = Field(20.0, gt=0)
    """Bound of the log ratio in it."""
    kl_output_clamp_value: float | None = Field(10.0, gt=0)
    """Bound of the weighted estimate."""
    use_kl_in_reward: bool = False
    """Take the penalty off the reward, and leave it out of the loss."""
    use_importance_sampling_correction: bool = False
    """Multiply by old / sampler."""
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """What is done about weights outside their bounds: truncated; zeroed; or rows are dropped by the geometric mean."""
    truncated_importance_sampling_ratio: float | None = Field(None, gt=0)
    """Upper bound."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound; None: 0."""
    use_on_policy_kl_approximation: bool = False
    """Weigh the KL estimate with policy / sampler."""
    force_on_policy_ratio: bool = False
    """Take the policy itself for the old one: every ratio is 1."""
    use_cispo: bool = False
    """The clipped ratio as a detached weight."""
    positive_example_nll_weight: float = Field(0.0, ge=0)
    """Weight of the likelihood of rewarded rows; silently without effect where the batch has no rewards."""
    global_valid_seqs: float | None = Field(None, ge=0)
    """Given: rows of the whole batch whose sample mask is 1."""
    global_valid_toks: float | None = Field(None, ge=0)
    """Given: tokens of the whole batch that count."""

    @model_validator(mode="after")
    def _as_there(self) -> ClippedPGSettings:
        kind = self.truncated_importance_sampling_type
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        sequence = self.sequence_level_importance_ratios
        broken = (
            (sequence and self.token_level_loss, "sequence_level_importance_ratios needs token_level_loss: False"),
            (
                self.use_cispo
                and (
                    self.disable_ppo_ratio
                    or self.force_on_policy_ratio
                    or sequence
                    or self.ratio_clip_c is not None
                    or not self.token_level_loss
                ),
                "use_cispo goes with token_level_loss, and not with disable_ppo_ratio, force_on_policy_ratio, "
                "sequence_level_importance_ratios or ratio_clip_c",
            ),
            (
                kind is not None and not self.use_importance_sampling_correction,
                "truncated_importance_sampling_type needs use_importance_sampling_correction",
            ),
            (
                kind is not None and high is None,
                "truncated_importance_sampling_type needs truncated_importance_sampling_ratio",
            ),
            (
                kind is None and high is not None,
                "truncated_importance_sampling_ratio needs truncated_importance_sampling_type",
            ),
            (
                kind in ("icepop", "seq-mask-tis") and low is None,
                f"{kind} needs truncated_importance_sampling_ratio_min",
            ),
            (
                kind is not None and low is not None and high is not None and low > high,
                "truncated_importance_sampling_ratio_min is above truncated_importance_sampling_ratio",
            ),
            (kind == "seq-mask-tis" and sequence, "seq-mask-tis does not go with sequence_level_importance_ratios"),
        )
        for wrong, rule in broken:
            if wrong:
                raise ValueError(rule)
        return self


class NLLSettings(Settings):
    """`NLLLossFn` (the same file)."""

    global_valid_toks: float | None = Field(None, ge=0)
    """Given: tokens of the whole batch that count."""


class PreferenceSettings(Settings):
    """`PreferenceLossFn` (the same file): Bradley-Terry on rewards of rows 2i (chosen) and 2i + 1 (rejected)."""

    global_valid_seqs: float | None = Field(None, ge=0)
    """Given: rows of the whole batch, two a pair."""


class DPOSettings(PreferenceSettings):
    """`DPOLossConfig` (the same file)."""

    reference_policy_kl_penalty: float = 0.05
    """Inverse temperature of the implied reward."""
    preference_loss_weight: float = 1.0
    """Weight of the preference term."""
    sft_loss_weight: float = Field(0.0, ge=0)
    """Weight of the chosen rows' negative log-likelihood."""
    preference_average_log_probs: bool = False
    """Implied rewards are means over tokens, not sums."""
    sft_average_log_probs: bool = False
    """Likelihoods of rows are means over tokens, not sums."""
    global_valid_toks: float | None = Field(None, ge=0)
    """Given, and not used."""


class ValueSettings(Settings):
    """`MseValueLossConfig` (the same file): half the squared error."""

    scale: float = 1.0
    """Multiplies the loss."""
    cliprange: float | None = None
    """How far a value may move from the old one; None and 0: any distance."""
    global_valid_toks: float | None = Field(None, ge=0)
    """Given: tokens of the whole batch that count."""
    global_valid_seqs: float | None = Field(None, ge=0)
    """Given, and not used."""


class KLSettings(Settings):
    """`calculate_kl` (nemo_rl/algorithms/utils.py, 7ea279ab)."""

    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """The estimator."""
    input_clamp_value: float | None = Field(20.0, gt=0)
    """Bound of the log ratio."""
    output_clamp_value: float | None = Field(10.0, gt=0)
    """Bound of the estimate."""


class GroupSettings(Settings):
    """`GRPOAdvantageEstimator` (nemo_rl/algorithms/advantage_estimator.py, 7ea279ab)."""

    use_leave_one_out_baseline: bool = True
    """Against the mean, and in deviations, of the other answers of the group."""
    normalize_rewards: bool = True
    """Divide by the deviation plus 1e-6, where there is any."""


class RewardKLSettings(Settings):
    """A KL penalty in the reward, of the estimators that have one (the same file)."""

    kl_in_reward: Literal["k1", "k2", "k3"] | None = None
    """Its estimator; None: no penalty."""
    kl_coef: float = 0.01
    """Its coefficient: reference_policy_kl_penalty of the loss."""


class ReinforcePlusPlusSettings(RewardKLSettings):
    """`ReinforcePlusPlusAdvantageEstimator` (the same file)."""

    minus_baseline: bool = True
    """Take the group's mean off the reward."""


class GAESettings(RewardKLSettings):
    """`GeneralizedAdvantageEstimator` (the same file)."""

    gae_lambda: float = 0.95
    """Lambda of whatever has none of its own."""
    gae_gamma: float = 1.0
    """Discount."""
    normalize_advantages: bool = True
    """Whiten them over the batch."""
    gae_lambda_value: float | None = None
    """Lambda of the critic's returns."""
    gae_lambda_policy: float | None = None
    """Lambda of the advantages."""
    length_adaptive_alpha: float = Field(0.0, ge=0)
    """Lambda of the advantages is 1 - 1 / (alpha length); 0: it is not."""


class RawRewardSettings(Settings):
    """`RawRewardAdvantageEstimator` (the same file)."""

    normalize_advantages: bool = True
    """Whiten them over the batch."""


class ShapingSettings(Settings):
    """`RewardShapingConfig` (nemo_rl/algorithms/reward_functions.py, 7ea279ab), switched on."""

    enabled: bool = True
    """Whether rewards are shaped at all."""
    overlong_buffer_length: int | None = None
    """The last stretch of answers, in which they are punished."""
    overlong_buffer_penalty: float | None = None
    """The punishment at its end."""
    max_response_length: int | None = None
    """Where it ends."""
    stop_properly_penalty_coef: float | None = None
    """What a truncated answer keeps of its reward. The overlong options are then silently ignored."""


# ---- the policy loss -------------------------------------------------------------------------------------------

GIVEN = ("global_valid_seqs", "global_valid_toks")


def translate(settings: ClippedPGSettings) -> Translation:
    """The clipped loss, from its flags."""
    spec = LossSpec(
        name="grpo",
        surrogate=_surrogate(settings),
        correction=_correction(settings),
        kl=_kl(settings),
        old_policy="current" if settings.force_on_policy_ratio else "recorded",
        positive_nll_coefficient=settings.positive_example_nll_weight,
        denominator="token" if settings.token_level_loss else "document",
        documents_counted="all",
        scaling=SCALING,
    )
    return Translation(spec, tuple(_notes(settings)), GIVEN)


SCALING: ScalingSpec = CONTRACTS["nemo_rl"]["dtensor"].model_copy(
    update={"count_epsilon": EPSILON, "length_epsilon": EPSILON, "mean_epsilon": EPSILON}
)
"""What is divided by what: counts of the whole batch, each plus 1e-8."""


def _surrogate(settings: ClippedPGSettings) -> dict[str, Any]:
    clip = {"clip_low": settings.ratio_clip_min, "clip_high": settings.ratio_clip_max}
    if settings.force_on_policy_ratio:
        return {"kind": "on_policy"}
    if settings.disable_ppo_ratio:
        return {"kind": "reinforce"}
    if settings.use_cispo:
        return {"kind": "cispo", **clip}
    return {
        "kind": "gspo" if settings.sequence_level_importance_ratios else "ppo",
        "dual_clip": settings.ratio_clip_c,
        **clip,
    }


def _correction(settings: ClippedPGSettings) -> dict[str, Any]:
    if not settings.use_importance_sampling_correction:
        return {}
    kind = settings.truncated_importance_sampling_type
    ratio = "document_sum" if settings.sequence_level_importance_ratios else "token"
    low, high = settings.truncated_importance_sampling_ratio_min, settings.truncated_importance_sampling_ratio
    if kind == "seq-mask-tis":
        return {"kind": "geometric_gate", "gate_low": low, "gate_high": high}
    bounds = {"ratio_low": low, "ratio_high": high} if kind is not None else {}
    return {
        "kind": "importance_sampling",
        "ratio": ratio,
        **bounds,
        "outside": "zero" if kind == "icepop" else "truncate",
    }


def _kl(settings: ClippedPGSettings) -> dict[str, Any]:
    penalty = {"coefficient": settings.reference_policy_kl_penalty, "estimator": settings.reference_policy_kl_type}
    if settings.use_kl_in_reward:
        return {**penalty, "placement": "reward", **IN_REWARD}
    return {
        **penalty,
        "gradient": "score",
        "importance": "sampler" if settings.use_on_policy_kl_approximation else "none",
        "input_clamp": settings.kl_input_clamp_value,
        "output_clamp": settings.kl_output_clamp_value,
    }


def _notes(settings: ClippedPGSettings) -> list[str]:
    """What it does without saying so."""
    notes = ["1e-8 is added to every count that divides", "rows without tokens count as rows"]
    without_ratio = settings.disable_ppo_ratio or settings.force_on_policy_ratio
    if without_ratio and settings.ratio_clip_c is not None:
        notes.append("ratio_clip_c has no effect: what it bounds is never above 1")
    if settings.disable_ppo_ratio and settings.force_on_policy_ratio:
        notes.append("disable_ppo_ratio has no effect beside force_on_policy_ratio")
    if settings.use_importance_sampling_correction and settings.sequence_level_importance_ratios:
        notes.append(
            "the correction weight of a row is the product of its tokens' ratios, their ratio the geometric "
            "mean; a product that overflows becomes 0, so that the worst row drops out"
        )
    elif settings.use_importance_sampling_correction:
        notes.append("a correction weight that overflows becomes 0, whatever its upper bound")
    if settings.use_kl_in_reward:
        notes.append("clamps of the penalty in the reward are 20 and 10, whatever the options say")
        notes.append("the penalty is in the advantages that the loss is given, and no term of the loss")
    if settings.reference_policy_kl_penalty and not settings.use_kl_in_reward:
        notes.append("the KL penalty carries the gradient of sampling: that of k3 is that of k2")
    if settings.positive_example_nll_weight:
        notes.append(
            "positive_example_nll_weight has no effect on a batch without rewards; elsewhere its divisor is "
            "counted in each micro-batch"
        )
    return notes


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of the clipped loss; up to the 1e-8 that it adds to counts."""
    surrogate, correction, kl = spec.surrogate, spec.correction, spec.kl
    level = {"token": True, "document": False}.get(spec.denominator)
    if level is None:
        raise SpecError(
            f"options of NeMo-RL for denominator = {spec.denominator!r}",
            rule="it takes means over tokens, or over rows of the row's mean",
            fix="use token or document",
        )
    settings: dict[str, Any] = {
        "token_level_loss": level,
        "reference_policy_kl_penalty": kl.coefficient,
        "positive_example_nll_weight": spec.positive_nll_coefficient,
        "disable_ppo_ratio": surrogate.kind == "reinforce",
        "use_cispo": surrogate.kind == "cispo",
        "force_on_policy_ratio": surrogate.kind == "on_policy",
        "sequence_level_importance_ratios": surrogate.kind == "gspo" or correction.ratio == "document_sum",
        "use_importance_sampling_correction": correction.acts,
    }
    if kl.coefficient:
        settings |= {
            "reference_policy_kl_type": kl.estimator,
            "use_kl_in_reward": kl.placement == "reward",
            "use_on_policy_kl_approximation": kl.importance == "sampler",
        }
        if kl.placement == "loss":
            settings |= {"kl_input_clamp_value": kl.input_clamp, "kl_output_clamp_value": kl.output_clamp}
    if surrogate.clip_high is not None:
        settings |= {
            "ratio_clip_min": surrogate.clip_low,
            "ratio_clip_max": surrogate.clip_high,
            "ratio_clip_c": surrogate.dual_clip,
        }
    if correction.gate != "none":
        settings |= _bounds("seq-mask-tis", correction.gate_low, correction.gate_high)
    elif correction.ratio_low is not None or correction.ratio_high is not None:
        kind = "icepop" if correction.outside == "zero" else "tis"
        settings |= _bounds(kind, correction.ratio_low, correction.ratio_high)
    return checked_back("NeMo-RL", _where_it_matters(spec), ClippedPGSettings, translate, settings)


def _where_it_matters(spec: LossSpec) -> LossSpec:
    """The spec with NeMo-RL's own setting wherever no number depends on it, or only by an epsilon."""
    like = {
        name: getattr(SCALING, name)
        for name in ("count_epsilon", "length_epsilon", "mean_epsilon")
        if getattr(spec.scaling, name) <= EPSILON
    }
    changes: dict[str, Any] = {"scaling": spec.scaling.model_copy(update=like)}
    if not spec.kl.coefficient:
        changes["kl"] = KLSpec(**_kl(ClippedPGSettings(reference_policy_kl_penalty=0.0)))
    if spec.denominator == "token":
        changes["documents_counted"] = "all"
    if spec.surrogate.kind == "on_policy" and not spec.correction.acts:
        changes["old_policy"] = "current"
    return spec.model_copy(update=changes)


def _bounds(kind: str, low: float | None, high: float | None) -> dict[str, Any]:
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


def counts(settings: Any) -> GivenCounts:
    """The global counts."""
    return GivenCounts(tokens=settings.global_valid_toks, documents=getattr(settings, "global_valid_seqs", None))


def case_settings(case: Case) -> Mapping[str, Any]:
    """Without rewards there are no rewarded rows to imitate."""
    return case.config if case.get("rewards") is not None else {**case.config, "positive_example_nll_weight": 0.0}


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Metrics are divided by the global counts."""
    return settings_of(replayed.translation.spec, replayed.slots)._replace(given=counts(replayed.settings))


def metrics(replayed: Replayed) -> dict[str, float]:
    """The terms of the loss, and how many rows are here."""
    return {
        **named.of_the_loss(replayed.evaluated.terms, replayed.evaluated.scalars),
        "num_valid_samples": _sampled_rows(replayed.case),
    }


def _sampled_rows(case: Case) -> float:
    sampled = case.get("sample_mask")
    return float(case.shape[0] if sampled is None else len(torch.nonzero(sampled)))


def policy_loss(case: Case) -> dict[str, Any]:
    """`ClippedPGLossFn`: from log-probabilities.

    Where top-k or top-p filters the policy of the ratio, its unfiltered log-probabilities come as
    ``logprobs_unfiltered``: the KL penalty, with its weight, is of those, and has a gradient of its own.
    """
    unfiltered = case.get("logprobs_unfiltered")
    if unfiltered is None:
        return replays.policy_loss(case)
    leaf, whole = case["logprobs"].clone().requires_grad_(), unfiltered.clone().requires_grad_()
    found = evaluate_case(case, silent(leaf.reshape(-1)))
    if "kl" not in found.evaluated.terms:  # without a penalty in the loss it does not look at them, either
        return finish(found, {"grad_logprobs": leaf})
    row = found.row
    unfiltered_T = torch.where(row.loss_mask_T, whole.reshape(-1), row.old_logprobs_T)
    penalty = kl_term(replace(found.inputs, policy_logprobs_T=unfiltered_T), found.translation.spec.kl)
    terms = {**found.evaluated.terms, "kl": penalty}
    evaluated = found.evaluated._replace(terms=terms, scalars=reduce_terms(terms, found.weights, row.loss_mask_T))
    return finish(replace(found, evaluated=evaluated), {"grad_logprobs": leaf, "grad_logprobs_unfiltered": whole})


# ---- other losses ----------------------------------------------------------------------------------------------


def nll(case: Case) -> dict[str, Any]:
    """`NLLLossFn`: the mean over tokens."""
    settings = parse_settings(NLLSettings, case.config, where=case.system)
    leaf = case["logprobs"].clone().requires_grad_()
    translation = Translation(LossSpec(name="sft", scaling=SCALING))
    found = evaluate_as(case, silent(leaf.reshape(-1)), settings, translation, counts(settings))
    total = found.evaluated.scalars["total"].value
    total.backward()
    return {
        "loss": total.detach(),
        "grad_logprobs": leaf.grad,
        "metrics": {
            "loss": float(total.detach()),
            "num_unmasked_tokens": float(len(torch.nonzero(case.loss_mask_T))),
            "num_valid_samples": _sampled_rows(case),
        },
    }


def preference(case: Case) -> dict[str, Any]:
    """`PreferenceLossFn`: rewards of a reward model."""
    settings = parse_settings(PreferenceSettings, case.config, where=case.system)
    leaf = case["rewards"].clone().requires_grad_()
    rewards_N = leaf.reshape(-1)
    terms = {"preference": Term(pair_losses(rewards_N[::2], rewards_N[1::2]))}
    return {**_of_pairs(case, settings, rewards_N, terms), "grad_rewards": leaf.grad}


def dpo(case: Case) -> dict[str, Any]:
    """`DPOLossFn`: implied rewards, and perhaps the likelihood of what was chosen."""
    settings = parse_settings(DPOSettings, case.config, where=case.system)
    leaf = case["logprobs"].clone().requires_grad_()
    size, sampled_T = case.shape[0], case.loss_mask_T
    # Implied rewards look at the tokens of rows that the sample mask takes out, too.
    tokens_T = case["mask"].reshape(-1).bool()
    ref_T = torch.where(tokens_T, case["ref_logprobs"].reshape(-1), torch.zeros_like(leaf.reshape(-1)))
    inputs = LossInputs(
        leaf.reshape(-1), ref_T, ref_T, ref_logprobs_T=ref_T, loss_mask_T=tokens_T, document_ids_T=case.document_ids_T
    )
    rewards_N = document_rewards(inputs, size, average=settings.preference_average_log_probs)
    likelihoods_N = document_rewards(
        replace(inputs, loss_mask_T=sampled_T), size, against=None, average=settings.sft_average_log_probs
    )
    terms = {
        "preference": Term(
            pair_losses(rewards_N[::2], rewards_N[1::2], beta=settings.reference_policy_kl_penalty),
            settings.preference_loss_weight,
        ),
        "sft": Term(likelihoods_N[::2], -settings.sft_loss_weight),
    }
    return {**_of_pairs(case, settings, rewards_N, terms), "grad_logprobs": leaf.grad}


def _of_pairs(case: Case, settings: PreferenceSettings, rewards_N: Tensor, terms: Mapping[str, Term]) -> dict[str, Any]:
    """Terms of pairs, summed over those whose chosen row counts and divided by all pairs of the batch."""
    sampled_N = (
        torch.ones_like(rewards_N, requires_grad=False)
        if case.get("sample_mask") is None
        else case["sample_mask"].double()
    )
    pairs = None if settings.global_valid_seqs is None else settings.global_valid_seqs / 2
    chosen_P, rejected_P = (pair_weights(sampled_N[at::2], pairs=pairs, epsilon=EPSILON) for at in (0, 1))
    scalars = reduce_terms(terms, {"policy": TokenWeights(chosen_P, chosen_P)}, sampled_N[::2].bool())
    total = scalars["total"].value
    total.backward()
    return {
        "loss": total.detach(),
        "metrics": {
            **named.of_pairs(terms, scalars, rewards_N, chosen_P, rejected_P),
            "num_valid_samples": len(torch.nonzero(sampled_N)) / 2,
        },
    }


def value(case: Case) -> dict[str, Any]:
    """`MseValueLossFn`: the critic's error."""
    settings = parse_settings(ValueSettings, case.config, where=case.system)
    leaf, clip = case["values"].clone().requires_grad_(), settings.cliprange or None
    values_T, returns_T, counts_T = leaf.reshape(-1), case["returns"].reshape(-1), case.loss_mask_T
    old_T = None if clip is None else case["old_values"].reshape(-1)
    term = value_loss(values_T, returns_T, counts_T, old_values_T=old_T, clip=clip)
    (weights,), _ = step_weights([case.row()], LossSpec(scaling=SCALING), given=counts(settings))
    total = reduce_terms({"value": replace(term, coefficient=settings.scale)}, weights, counts_T)["total"].value
    total.backward()
    measured = named.of_values(term, values_T.detach(), returns_T, counts_T, settings.global_valid_toks)
    return {
        "loss": total.detach(),
        "grad_values": leaf.grad,
        "metrics": {**measured, "loss": float(total.detach()), "num_valid_samples": float(case.shape[0])},
    }


def kl_spec(case: Case) -> LossSpec:
    """`calculate_kl`, without importance weights."""
    settings = parse_settings(KLSettings, case.config, where=case.system)
    return LossSpec(
        kl={
            "coefficient": 1.0,
            "estimator": settings.kl_type,
            "input_clamp": settings.input_clamp_value,
            "output_clamp": settings.output_clamp_value,
        }
    )


# ---- advantages and rewards ------------------------------------------------------------------------------------


def advantage(case: Case) -> dict[str, Any]:
    """An estimator, by the name of its class."""
    found = ESTIMATORS.get(case.function.partition(".")[0])
    if found is None:
        raise SpecError(
            f"advantages of NeMo-RL by {case.function!r}",
            rule=f"one of {', '.join(ESTIMATORS)}",
            fix="choose one of them",
        )
    return found(case)


def _group(case: Case) -> dict[str, Any]:
    settings = parse_settings(GroupSettings, case.config, where=case.system)
    rewards_N, groups_N = case["rewards"], case["group_ids"]
    one_out = settings.use_leave_one_out_baseline
    baseline = "leave_one_out" if one_out else "mean"
    scale = "none" if not settings.normalize_rewards else "leave_one_out_std" if one_out else "std"
    baseline_N, deviation_N = group_baselines(rewards_N, groups_N, baseline=baseline)
    return {
        "advantages": group_advantages(rewards_N, groups_N, baseline=baseline, scale=scale, epsilon=1e-6),
        "baseline": baseline_N,
        "std": deviation_N,
    }


def _reinforce_plus_plus(case: Case) -> dict[str, Any]:
    settings = parse_settings(ReinforcePlusPlusSettings, case.config, where=case.system)
    rewards_N = case["rewards"]
    if settings.minus_baseline:
        rewards_N = group_advantages(rewards_N, case["group_ids"], scale="none")
    # Tokens that do not count are penalised and whitened with the others.
    everywhere_T = torch.ones_like(case.loss_mask_T)
    spread_T = spread_rewards(rewards_N, case.document_ids_T, _penalties(case, settings, everywhere_T))
    return {"advantages": case.shaped(_whitened(case, spread_T))}


def _raw_reward(case: Case) -> dict[str, Any]:
    settings = parse_settings(RawRewardSettings, case.config, where=case.system)
    spread_T = spread_rewards(case["rewards"], case.document_ids_T)
    return {"advantages": case.shaped(_whitened(case, spread_T) if settings.normalize_advantages else spread_T)}


def _whitened(case: Case, values_T: Tensor) -> Tensor:
    return whiten(values_T, case.loss_mask_T, ddof=0, epsilon=1e-8, epsilon_form="floor", elsewhere="whiten")


def _gae(case: Case) -> dict[str, Any]:
    settings = parse_settings(GAESettings, case.config, where=case.system)
    mask_T, ids_T = case.loss_mask_T, case.document_ids_T
    rewards_T = token_rewards(case["rewards"], ids_T, mask_T, _penalties(case, settings, mask_T))
    own = settings.gae_lambda if settings.gae_lambda_policy is None else settings.gae_lambda_policy
    critic = settings.gae_lambda if settings.gae_lambda_value is None else settings.gae_lambda_value
    advantages_T, returns_T = gae(
        rewards_T,
        case["values"].reshape(-1),
        ids_T,
        mask_T,
        discount=settings.gae_gamma,
        policy_lambda=own,
        value_lambda=critic,
        length_adaptive_alpha=settings.length_adaptive_alpha or None,
        elsewhere="carry",
    )
    if settings.normalize_advantages:
        advantages_T = whiten(advantages_T, mask_T, count_epsilon=EPSILON)
    return {
        "advantages": case.shaped(torch.where(mask_T, advantages_T, torch.zeros_like(advantages_T))),
        "returns": case.shaped(returns_T),
    }


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
    """`apply_reward_shaping`."""
    settings = parse_settings(ShapingSettings, case.config, where=case.system)
    rewards_N, kept = case["rewards"], settings.stop_properly_penalty_coef
    lengths = settings.max_response_length, settings.overlong_buffer_length, settings.overlong_buffer_penalty
    if not settings.enabled:
        return {"rewards": rewards_N}
    if kept is not None:
        return {"rewards": stop_properly(rewards_N, case["truncated"].bool(), coefficient=kept)}
    longest, buffer, penalty = lengths
    if longest is None or buffer is None or penalty is None:
        raise SpecError(
            "reward shaping of NeMo-RL",
            found="no stop_properly_penalty_coef, not all overlong options",
            rule="overlong_buffer_length, overlong_buffer_penalty and max_response_length go together",
            fix="give the three of them",
        )
    return {
        "rewards": overlong(rewards_N, case["response_lengths"], max_length=longest, buffer=buffer, penalty=penalty)
    }


SYSTEM = System(
    name="nemo_rl",
    title="NeMo-RL",
    version="7ea279ab (2026-08-22)",
    settings=ClippedPGSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["nemo_rl"],
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=metrics,
    replays={
        "policy_loss": policy_loss,
        "policy_loss_packed": policy_loss,
        "nll": nll,
        "dpo": dpo,
        "preference": preference,
        "value_loss": value,
        "kl_estimator": kl_estimator(kl_spec),
        "advantage": advantage,
        "reward_shaping": reward_shaping,
    },
)
