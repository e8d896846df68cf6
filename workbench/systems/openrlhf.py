"""OpenRLHF/OpenRLHF: clipped policy losses, a critic's loss, DPO, KL estimates and rewards of tokens.

Letters: T packed tokens | P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.preference import implied_rewards, mean_over_pairs, pair_losses
from workbench.losses.value import value_loss
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import step_weights
from workbench.rollouts.advantages.tokens import token_rewards
from workbench.rollouts.rewards import bounded, kl_penalties
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.back import checked_back
from workbench.systems.case import Case
from workbench.systems.contracts import CONTRACTS
from workbench.systems.empty_batch import (
    clipped_mean_gradient,
    log_ratio,
    sequence_mean_gradient,
    undefined,
    value_mean_gradient,
)
from workbench.systems.metrics import openrlhf as named
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, kl_estimator

LOG_CLAMP = 20.0
"""Bound of a token's log ratio."""
OUTPUT_CLAMP = 10.0
"""Bound of a KL estimate."""
EPSILON = 1e-8
"""Added to the length of a row."""


class AggregateSettings(Settings):
    """`aggregate_loss` (openrlhf/models/loss.py, 3c3be623)."""

    token_level_loss: bool = True
    """Mean over tokens; False: over rows with tokens, of the row's mean."""
    dp_size: int = Field(1, ge=1)
    """Given: data-parallel ranks, whose gradients the engine averages; without the count below it is ignored."""
    batch_num_tokens: float | None = Field(None, gt=0)
    """Given: tokens of the whole batch (over accumulation steps); None: those that are here."""
    global_batch_size: float | None = Field(None, gt=0)
    """Given: rows of the whole batch (over accumulation steps); None: those that are here."""


class PolicySettings(AggregateSettings):
    """`PolicyLoss` (the same file)."""

    clip_eps_low: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    clip_eps_high: float = Field(0.2, ge=0)
    """Length of the clip above 1."""
    dual_clip: float | None = Field(None, gt=1)
    """Ratio above which a negative advantage has no gradient; None: none."""
    policy_loss_type: Literal["ppo", "gspo"] = "ppo"
    """Ratio of tokens, or the geometric mean of a row's; gspo is always a mean over rows."""
    enable_vllm_is_correction: bool = False
    """Correct for the sampler: a weight old / sampler, or for gspo a ratio against the sampler."""
    vllm_is_truncated_threshold: tuple[float, float] | None = None
    """Bounds of the weight, or of a row's geometric mean of weights."""
    vllm_is_correction_type: Literal["tis", "icepop", "seq-mask-tis"] = "tis"
    """What is done outside: truncate; zero; or drop rows by their geometric mean."""

    @model_validator(mode="after")
    def _correction_has_bounds(self) -> PolicySettings:
        needed = self.enable_vllm_is_correction and self.policy_loss_type == "ppo"
        if needed and self.vllm_is_truncated_threshold is None:
            raise ValueError("enable_vllm_is_correction needs vllm_is_truncated_threshold, two bounds")
        return self


class ValueSettings(AggregateSettings):
    """`ValueLoss` (the same file): half the squared error."""

    clip_eps: float | None = Field(None, gt=0)
    """How far a value may move from the old one; None: any distance."""


class DPOSettings(Settings):
    """`DPOLoss` (the same file), on sums of log-probabilities."""

    beta: float = 0.1
    """Inverse temperature of the implied reward."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a preference is recorded the wrong way round; ipo ignores it."""
    ipo: bool = False
    """The squared distance of the margin from 1 / (2 beta)."""


class KLSettings(Settings):
    """`compute_approx_kl` (openrlhf/models/utils.py, 3c3be623)."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """The estimator."""
    output_clamp: float | None = Field(OUTPUT_CLAMP, gt=0)
    """Bound of the estimate; 10 there, always."""


class RewardSettings(Settings):
    """`compute_reward` (the same file)."""

    kl_coef: float = 0.0
    """Weight of the KL that is taken off; below 0 it is 0."""
    reward_clip_range: tuple[float, float] | None = None
    """Bounds of a row's reward."""


# ---- the policy loss -------------------------------------------------------------------------------------------


SCALING: ScalingSpec = CONTRACTS["openrlhf"]["deepspeed"].model_copy(update={"length_epsilon": EPSILON})
"""Counts of the whole batch; a row's length has 1e-8 more."""


def _by_token(settings: AggregateSettings) -> bool:
    return settings.token_level_loss and getattr(settings, "policy_loss_type", "ppo") == "ppo"


def translate(settings: PolicySettings) -> Translation:
    """The clipped loss of tokens or of rows."""
    sequence, corrected = settings.policy_loss_type == "gspo", settings.enable_vllm_is_correction
    surrogate: dict[str, Any] = {
        "kind": "gspo" if sequence else "ppo",
        "clip_low": settings.clip_eps_low,
        "clip_high": settings.clip_eps_high,
        "dual_clip": settings.dual_clip,
    }
    if sequence:
        surrogate["anchor"] = "sampler" if corrected else "old"
    else:
        surrogate["log_clamp"] = LOG_CLAMP
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        correction=_correction(settings),
        denominator="token" if _by_token(settings) else "document",
        scaling=SCALING,
    )
    return Translation(spec, tuple(_notes(settings)), ("dp_size", "batch_num_tokens", "global_batch_size"))


def _correction(settings: PolicySettings) -> dict[str, Any]:
    if not settings.enable_vllm_is_correction or settings.policy_loss_type == "gspo":
        return {}
    low, high = settings.vllm_is_truncated_threshold or (None, None)
    if settings.vllm_is_correction_type == "seq-mask-tis":
        return {"kind": "geometric_gate", "gate_low": low, "gate_high": high}
    return {
        "kind": "importance_sampling",
        "ratio_low": low,
        "ratio_high": high,
        "outside": "zero" if settings.vllm_is_correction_type == "icepop" else "truncate",
    }


def _notes(settings: PolicySettings) -> list[str]:
    """What it does without saying so."""
    if settings.policy_loss_type == "ppo":
        notes = ["the log ratio is held within +-20"]
        if settings.enable_vllm_is_correction and settings.vllm_is_correction_type == "seq-mask-tis":
            notes.append("rows that are kept have untruncated weights")
        return notes
    notes = ["gspo is a mean over rows, whatever token_level_loss says"]
    if settings.enable_vllm_is_correction:
        notes.append("gspo takes its ratio against the sampler; vllm_is_correction_type and its bounds have no effect")
    return notes


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of the clipped loss; up to the 1e-8 that it adds to lengths, and to ratios beyond e^20."""
    surrogate, correction = spec.surrogate, spec.correction
    if surrogate.kind not in ("ppo", "gspo"):
        raise SpecError(
            f"options of OpenRLHF for the surrogate {surrogate.kind!r}",
            rule="its losses are ppo and gspo",
            fix="take one of them, or another system",
        )
    settings: dict[str, Any] = {
        "policy_loss_type": surrogate.kind,
        "clip_eps_low": surrogate.clip_low,
        "clip_eps_high": surrogate.clip_high,
        "dual_clip": surrogate.dual_clip,
        "token_level_loss": spec.denominator == "token",
    }
    if surrogate.kind == "gspo" and surrogate.anchor == "sampler":
        settings["enable_vllm_is_correction"] = True
    elif correction.acts:
        gated = correction.gate != "none"
        bounds = (correction.gate_low, correction.gate_high) if gated else (correction.ratio_low, correction.ratio_high)
        if None in bounds:
            raise SpecError(
                "options of OpenRLHF for a correction with one bound",
                found=f"{bounds[0]} to {bounds[1]}",
                rule="it has a lower and an upper one",
                fix="give both",
            )
        kind = "seq-mask-tis" if gated else "icepop" if correction.outside == "zero" else "tis"
        settings |= {
            "enable_vllm_is_correction": True,
            "vllm_is_correction_type": kind,
            "vllm_is_truncated_threshold": bounds,
        }
    return checked_back("OpenRLHF", _where_it_matters(spec), PolicySettings, translate, settings)


def _where_it_matters(spec: LossSpec) -> LossSpec:
    """The spec with OpenRLHF's own setting wherever no number depends on it, or only by an epsilon."""
    changes: dict[str, Any] = {}
    if spec.denominator == "token" or spec.scaling.length_epsilon <= EPSILON:
        changes["scaling"] = spec.scaling.model_copy(update={"length_epsilon": EPSILON})
    if spec.surrogate.kind == "ppo" and spec.surrogate.log_clamp is None:
        changes["surrogate"] = spec.surrogate.model_copy(update={"log_clamp": LOG_CLAMP})
    return spec.model_copy(update=changes)


def counts(settings: AggregateSettings) -> GivenCounts:
    """The global count of what the loss is a mean over, and then the ranks; both or neither."""
    by_token = _by_token(settings)
    count = settings.batch_num_tokens if by_token else settings.global_batch_size
    if count is None:
        return GivenCounts()
    return GivenCounts(**{"tokens" if by_token else "documents": count}, dp=settings.dp_size)


def undefined_loss(replayed: Replayed) -> dict[str, Tensor]:
    """NaN where `masked_mean` divides by 0: nothing counts here, and no count of the whole batch was handed in.

    The gradient is NaN, too, but for tokens that the clip cuts off, which have none.
    """
    if not _is_undefined(replayed.case, replayed.settings):
        return {}
    settings, case = replayed.settings, replayed.case
    policy_T, advantages_T = case["logprobs"].reshape(-1), case.spread("advantages").reshape(-1)
    if settings.policy_loss_type == "gspo":
        gradient_T = sequence_mean_gradient(advantages_T, case.document_ids_T, settings.clip_eps_low)
    else:
        gradient_T = clipped_mean_gradient(
            log_ratio(policy_T, case["old_logprobs"].reshape(-1)),
            advantages_T,
            clip_low=settings.clip_eps_low,
            clip_high=settings.clip_eps_high,
            dual_clip=settings.dual_clip,
            log_clamp=LOG_CLAMP,
        )
    return {"loss": undefined(), "grad_logprobs": gradient_T}


def _is_undefined(case: Case, settings: AggregateSettings) -> bool:
    """True if a mean is taken over nothing."""
    count = settings.batch_num_tokens if _by_token(settings) else settings.global_batch_size
    return count is None and not case.loss_mask_T.any()


# ---- other losses ----------------------------------------------------------------------------------------------


def value(case: Case) -> dict[str, Any]:
    """`ValueLoss`: the critic's error."""
    settings = parse_settings(ValueSettings, case.config, where=case.system)
    leaf = case["values"].clone().requires_grad_()
    old_T = None if settings.clip_eps is None else case["old_values"].reshape(-1)
    term = value_loss(
        leaf.reshape(-1), case["returns"].reshape(-1), case.loss_mask_T, old_values_T=old_T, clip=settings.clip_eps
    )
    spec = LossSpec(denominator="token" if settings.token_level_loss else "document", scaling=SCALING)
    (weights,), _ = step_weights([case.row()], spec, given=counts(settings))
    total = reduce_terms({"value": term}, weights, case.loss_mask_T)["total"].value
    total.backward()
    outputs = {"loss": total.detach(), "grad_values": leaf.grad, "metrics": {}}
    if _is_undefined(case, settings):
        gradient_T = value_mean_gradient(leaf.reshape(-1), case["returns"].reshape(-1), old_T, settings.clip_eps)
        return outputs | {"loss": undefined(), "grad_values": case.shaped(gradient_T)}
    return outputs


def dpo(case: Case) -> dict[str, Any]:
    """`DPOLoss`: from sums of log-probabilities."""
    settings = parse_settings(DPOSettings, case.config, where=case.system)
    leaf = torch.stack([case["chosen_logprob_sums"], case["rejected_logprob_sums"]]).requires_grad_()
    ref = torch.stack([case["ref_chosen_logprob_sums"], case["ref_rejected_logprob_sums"]])
    chosen_P, rejected_P = implied_rewards(leaf, ref)
    how: Mapping[str, Any] = {"kind": "ipo"} if settings.ipo else {"label_smoothing": settings.label_smoothing}
    total = mean_over_pairs(pair_losses(chosen_P, rejected_P, beta=settings.beta, **how))
    total.backward()
    return {
        "loss": total.detach(),
        "grad_chosen_rejected": leaf.grad,
        "metrics": named.of_pairs(chosen_P, rejected_P, settings.beta),
    }


def kl_spec(case: Case) -> LossSpec:
    """`compute_approx_kl`."""
    settings = parse_settings(KLSettings, case.config, where=case.system)
    return LossSpec(kl={"coefficient": 1.0, "estimator": settings.kl_estimator, "output_clamp": settings.output_clamp})


def reward(case: Case) -> dict[str, Any]:
    """`compute_reward`: the row's reward on its last token, less the KL of every token."""
    settings = parse_settings(RewardSettings, case.config, where=case.system)
    rewards_N = (
        case["rewards"] if settings.reward_clip_range is None else bounded(case["rewards"], *settings.reward_clip_range)
    )
    penalties_T = kl_penalties(case["kl"].reshape(-1), max(settings.kl_coef, 0.0))
    made_T = token_rewards(rewards_N, case.document_ids_T, case.loss_mask_T, penalties_T, elsewhere="as_given")
    return {"token_rewards": case.shaped(made_T)}


SYSTEM = System(
    name="openrlhf",
    title="OpenRLHF",
    version="3c3be623 (2026-08-13)",
    settings=PolicySettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["openrlhf"],
    outputs=undefined_loss,
    replays={
        "value_loss": value,
        "dpo_from_sums": dpo,
        "kl_estimator": kl_estimator(kl_spec),
        "reward_shaping": reward,
    },
)
