"""The GRPO step of NousResearch/torchtitan: rows of tokens from logits, a matrix of losses, two ways to reduce it.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from workbench.errors import SpecError
from workbench.losses.build import make_loss, surrogate_ratio
from workbench.losses.document_sums import LocalSums, document_totals, mean_of_document_means
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.reduction.evaluate import token_values
from workbench.rollouts.advantages.groups import group_advantages
from workbench.specs.losses import LossSpec
from workbench.systems.back import checked_back, refuse
from workbench.systems.case import Case
from workbench.systems.contracts import CONTRACTS
from workbench.systems.metrics.nous_torchtitan import Step, mean_logit, step_metrics
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, aggregation, evaluate_case, finish

SAFETY_BOUND = 20.0
"""Bound of the log of an importance weight."""
ROWS = "mean over rows of per-row token mean"
TOKENS = "token mean"
ESTIMATORS = {"k3": "k3", "mse": "k2", "abs": "abs"}
"""Their KL estimator -> ours."""
UNSAMPLED = 1.0
"""A log-probability that no token has: its position was not sampled."""


class RolloutISSettings(Settings):
    """Importance weights of the trainer against the sampler (torchtitan/grpo/importance_sampling.py, 94d6abd4)."""

    rollout_is_level: Literal["token", "sequence", "geometric"] = "token"
    """Over what the log ratio is summed, or averaged."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """Bound weights from above, or zero those outside both bounds."""
    rollout_is_threshold: float | None = Field(None, gt=0)
    """Upper bound; None: no weights."""
    rollout_is_threshold_lower: float | None = Field(None, ge=0)
    """Lower bound of mode mask; None: 1 / upper."""
    rollout_is_veto_threshold: float | None = Field(1e-4, gt=0)
    """Rows with a token whose ratio is below this weigh 0; None: none do."""

    @property
    def lower(self) -> float:
        """The lower bound of mode mask."""
        return (
            1 / self.rollout_is_threshold
            if self.rollout_is_threshold_lower is None
            else self.rollout_is_threshold_lower
        )

    @model_validator(mode="after")
    def _bounds_in_order(self) -> RolloutISSettings:
        if (
            self.rollout_is_threshold is not None
            and self.rollout_is_mode == "mask"
            and self.lower > self.rollout_is_threshold
        ):
            raise ValueError(
                "no weight is at least rollout_is_threshold_lower (1 / rollout_is_threshold where that is "
                "not given) and at most rollout_is_threshold"
            )
        return self


class NousSettings(Settings):
    """Options of the step (`job_config.grpo` in torchtitan/grpo/grpo_step.py, 94d6abd4).

    Its defaults stand in a file that was not read; here nothing acts but a clip of 0.2.
    """

    reduction: Literal["mean over rows of per-row token mean", "token mean"] = ROWS
    """What the trainer makes of the matrix of losses."""
    policy_ratio_type: Literal["token", "sequence"] = "token"
    """Ratio of tokens, or of rows."""
    clip_ratio_lower_bound: float = Field(0.2, ge=0)
    """Length of the clip below 1, for rewards that are not positive."""
    clip_ratio_upper_bound: float = Field(0.2, ge=0)
    """Length of the clip above 1, for positive rewards."""
    use_ref_model: bool = False
    """A KL penalty."""
    kl_estimator_type: Literal["k3", "mse", "abs"] = "k3"
    """Its estimator; mse is half the squared log ratio."""
    kl_beta: float = 0.0
    """Its coefficient; one that is not positive counts as 0."""
    entropy_loss_weight: float = 0.0
    """Coefficient of the entropy bonus; one that is not positive counts as 0."""
    logit_loss_weight: float = 0.0
    """Its square multiplies the mean squared logit; one that is not positive counts as 0."""
    onpolicy_logp_threshold: float = 0.0
    """Tokens less likely than this leave metrics, means over a row, and importance weights; 0 and 1: none do. A
    probability, or, where negative, its log."""
    rollout_is: RolloutISSettings | None = None
    """Importance weights against the sampler; their options may also be given one by one."""

    @model_validator(mode="before")
    @classmethod
    def _weights_one_by_one(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        loose = {name: value[name] for name in RolloutISSettings.model_fields if name in value}
        kept = {name: option for name, option in value.items() if name not in loose}
        return {**kept, "rollout_is": {**(kept.get("rollout_is") or {}), **loose}} if loose else kept

    @property
    def logprob_floor(self) -> float | None:
        """The threshold as a log-probability; None: there is none."""
        threshold = self.onpolicy_logp_threshold
        if threshold in (0.0, 1.0):
            return None
        return math.log(threshold) if 0 < threshold < 1 else threshold


def translate(settings: NousSettings) -> Translation:
    """The loss of the step, reduced as the trainer does."""
    notes = (
        []
        if settings.reduction == TOKENS
        else ["a row without a token makes its mean over rows undefined; here it counts as 0"]
    )
    sequence, weights = settings.policy_ratio_type == "sequence", settings.rollout_is
    corrected = weights is not None and weights.rollout_is_threshold is not None
    if settings.logprob_floor is not None and (sequence or corrected):
        raise SpecError(
            "nous_torchtitan: onpolicy_logp_threshold with policy_ratio_type sequence or rollout_is",
            found=settings.onpolicy_logp_threshold,
            rule="it takes unlikely tokens out of a row's mean, or makes their weight 0, by what the live "
            "policy says, and leaves them in the loss; no setting here does",
            fix="drop one of them",
        )
    if settings.logprob_floor is not None:
        notes.append("onpolicy_logp_threshold acts on metrics alone")
    if sequence:
        notes.append(
            "its gradient is twice that of this loss: the row's mean is not detached beside the token's own term"
        )
    if corrected and weights.rollout_is_level == "geometric":
        notes.append("it gives every row the mean over rows of their means; here each row has its own")
    surrogate = {
        "kind": "gspo" if sequence else "ppo",
        "clip_low": settings.clip_ratio_lower_bound,
        "clip_high": settings.clip_ratio_upper_bound,
    }
    kl: dict[str, Any] = {}
    if settings.use_ref_model and settings.kl_beta > 0:
        kl = {"coefficient": settings.kl_beta, "estimator": ESTIMATORS[settings.kl_estimator_type]}
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        kl=kl,
        correction=correction(weights) if corrected else {},
        entropy_coefficient=max(settings.entropy_loss_weight, 0.0),
        mean_squared_logit_coefficient=max(settings.logit_loss_weight, 0.0) ** 2,
        denominator="token" if settings.reduction == TOKENS else "document",
        documents_counted="trained" if settings.reduction == TOKENS else "all",
        scaling=CONTRACTS["nous_torchtitan"]["fsdp"],
    )
    return Translation(spec, tuple(notes))


def correction(weights: RolloutISSettings) -> dict[str, Any]:
    """Importance weights in our words."""
    ratio = {"token": "token", "sequence": "document_sum", "geometric": "document_mean"}[weights.rollout_is_level]
    found = {"ratio": ratio, "ratio_high": weights.rollout_is_threshold, "log_clamp": SAFETY_BOUND, "unsampled": "drop"}
    if weights.rollout_is_mode == "mask":
        found |= {"ratio_low": weights.lower, "outside": "zero"}
    if weights.rollout_is_veto_threshold is not None:
        found |= {"gate": "ratio", "gate_level": "document_min", "gate_low": weights.rollout_is_veto_threshold}
    return found


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of the step."""
    surrogate, weights = spec.surrogate, spec.correction
    if surrogate.kind not in ("ppo", "gspo"):
        raise refuse("the torchtitan fork", f"the surrogate {surrogate.kind!r}", "it clips ratios of tokens or of rows")
    settings: dict[str, Any] = {
        "reduction": TOKENS if spec.denominator == "token" else ROWS,
        "policy_ratio_type": "token" if surrogate.kind == "ppo" else "sequence",
        "clip_ratio_lower_bound": surrogate.clip_low,
        "clip_ratio_upper_bound": surrogate.clip_high,
        "use_ref_model": bool(spec.kl.coefficient),
        "kl_beta": spec.kl.coefficient,
        "kl_estimator_type": next((theirs for theirs, ours in ESTIMATORS.items() if ours == spec.kl.estimator), "k3"),
        "entropy_loss_weight": spec.entropy_coefficient,
        "logit_loss_weight": math.sqrt(spec.mean_squared_logit_coefficient),
    }
    if weights.acts:
        settings["rollout_is"] = {
            "rollout_is_level": {"document_sum": "sequence", "document_mean": "geometric"}.get(weights.ratio, "token"),
            "rollout_is_mode": "mask" if weights.outside == "zero" else "truncate",
            "rollout_is_threshold": weights.ratio_high,
            "rollout_is_threshold_lower": weights.ratio_low,
            "rollout_is_veto_threshold": weights.gate_low,
        }
    return checked_back("the torchtitan fork", spec, NousSettings, translate, settings)


# ---- the step --------------------------------------------------------------------------------------------------


def policy_loss_logits(case: Case) -> dict[str, Any]:
    """The step: the loss, and the matrix of losses that it is made of, also where nothing trains."""
    leaf = case["logits"].clone().requires_grad_()
    logits_TV = leaf.reshape(-1, leaf.shape[-1])
    said = token_logprobs_from_logits(
        logits_TV, case["targets"].reshape(-1).clamp_min(0), wanted=("entropy", "logsumexp", "mean_squared_logit")
    )
    replayed = evaluate_case(case, said)
    outputs = finish(replayed, {"grad_logits": leaf})
    step = everywhere(replayed, said, mean_logit(logits_TV))
    return {
        **outputs,
        "per_token_loss": case.shaped(token_values(step.terms)),
        "logprobs": case.shaped(said.logprobs_T),
        "metrics": step_metrics(step),
    }


def everywhere(replayed: Replayed, said: TokenLogprobs, mean_logit_T: torch.Tensor) -> Step:
    """The loss evaluated on every position, with the sums of rows over those that train."""
    case, row, spec = replayed.case, replayed.row, replayed.translation.spec
    raw = {
        name: None if case.get(name) is None else case.spread(name).reshape(-1)
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")
    }
    live_T, sampler_T = said.logprobs_T.detach(), raw["rollout_logprobs"]
    drawn_T = (
        None if sampler_T is None else torch.where(row.loss_mask_T, sampler_T, torch.full_like(sampler_T, UNSAMPLED))
    )
    inputs = LossInputs(
        live_T,
        live_T if raw["old_logprobs"] is None else raw["old_logprobs"],
        raw["advantages"],
        drawn_T,
        raw["ref_logprobs"] if replayed.settings.use_ref_model else None,
        said.entropy_T.detach(),
        loss_mask_T=torch.ones_like(row.loss_mask_T),
        document_ids_T=row.document_ids_T,
        lengths_T=row.lengths_T,
        logsumexp_T=said.logsumexp_T.detach(),
        mean_squared_logit_T=said.mean_squared_logit_T.detach(),
        sums=LocalSums(row.document_ids_T, row.loss_mask_T),
    )
    settings = replayed.settings
    return Step(
        spec,
        inputs,
        make_loss(spec)(inputs),
        surrogate_ratio(inputs, spec),
        row.loss_mask_T,
        row.document_ids_T,
        sampler_T,
        mean_logit_T,
        ESTIMATORS[settings.kl_estimator_type],
        raw["old_logprobs"] is None,
        settings.logprob_floor,
    )


# ---- what is no policy loss ------------------------------------------------------------------------------------


class MaskedSettings(Settings):
    """`masked_mean` and `masked_sum` (torchtitan/grpo/utils.py, 94d6abd4)."""

    per_seq: bool = False
    """By row; the mean is then a mean over rows."""


class RewardNormSettings(Settings):
    """`distributed_reward_norm` (RUFFY-369/torchtitan a79e8b5d)."""

    ranks: int = Field(1, ge=1)
    """More than one take the deviation of the population; here it is that of a sample on any number."""
    eps: float = Field(1e-8, ge=0)
    """Added to the deviation."""


def _over_tokens(case: Case) -> LossSpec:
    return LossSpec(denominator="raw" if "sum" in case.function else "token")


def masked(case: Case) -> dict[str, Any]:
    """Sums and means of values under a mask; a mean over rows is undefined where a row has none."""
    settings = parse_settings(MaskedSettings, case.config, where="nous_torchtitan")
    if not settings.per_seq:
        return aggregation(_over_tokens, result="result")(case)
    leaf = case["values"].clone().requires_grad_()
    make = document_totals if "sum" in case.function else mean_of_document_means
    result = make(leaf.reshape(-1), case.loss_mask_T, case.document_ids_T, case.shape[0])
    cotangent = case.get("cotangent")
    result.backward(torch.ones_like(result) if cotangent is None else cotangent)
    return {"result": result.detach(), "grad_values": leaf.grad, "metrics": {}}


def reward_norm(case: Case) -> dict[str, Any]:
    """Rewards against the mean of their group, in deviations of it."""
    settings = parse_settings(RewardNormSettings, case.config, where="nous_torchtitan")
    return {"advantages": group_advantages(case["rewards"], case["group_ids"], ddof=1, epsilon=settings.eps)}


SYSTEM = System(
    name="nous_torchtitan",
    title="the torchtitan fork of Nous Research",
    version="94d6abd4",
    settings=NousSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS["nous_torchtitan"],
    replays={"policy_loss_logits": policy_loss_logits, "aggregation": masked, "advantage": reward_norm},
)
