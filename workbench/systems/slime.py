"""THUDM/slime: losses on packed samples, summed over samples, and divided when the step is known.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from workbench.errors import SpecError
from workbench.losses.kl import kl_term
from workbench.policy.logprobs.reference import kept_logits, token_logprobs_from_logits
from workbench.reduction.denominators import GivenCounts, length_shares
from workbench.reduction.weights import LOSS_WEIGHTS
from workbench.rollouts.advantages.tokens import gae
from workbench.specs.losses import LossSpec
from workbench.systems import metrics as aliases
from workbench.systems import replays
from workbench.systems.back import checked_back, refuse
from workbench.systems.case import Case, flags_of_logits, silent
from workbench.systems.contracts import CONTRACTS
from workbench.systems.metrics.alias import PeerSettings, settings_of
from workbench.systems.metrics.slime import opsm_clipfrac
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, evaluate_case, finish, policy_settings

KL_CLAMP = 10.0
"""low_var_kl: bound of the estimate."""


class SlimeSettings(Settings):
    """Arguments of slime's policy loss (slime/utils/arguments.py, 624b824a)."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = "grpo"
    """gspo: the ratio is one of a sample; cispo: it is truncated, not clipped. The others share one loss."""
    eps_clip: float = Field(0.2, ge=0)
    """Length of the clip below 1."""
    eps_clip_high: float | None = Field(None, ge=0)
    """Length of the clip above 1; None: eps_clip."""
    eps_clip_c: float | None = Field(None, gt=1)
    """Dual clip: bound of the ratio for negative advantages; None: none."""
    use_opsm: bool = False
    """Off-policy sequence masking."""
    opsm_delta: float | None = 1e-4
    """Its threshold."""
    use_kl_loss: bool = False
    """A KL penalty in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] | None = "k1"
    """Its estimator; low_var_kl is k3 within +-10."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Its coefficient."""
    use_unbiased_kl: bool = False
    """Multiply the estimate by policy / old, with its gradient."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    use_tis: bool = False
    """Truncated importance sampling of the train policy against the rollout's."""
    tis_clip: float = Field(2.0, gt=0)
    """Its upper bound."""
    tis_clip_low: float = Field(0.0, ge=0)
    """Its lower bound."""
    custom_tis_function_path: str | None = None
    """A function of the user's in place of truncation."""
    custom_pg_loss_reducer_function_path: str | None = None
    """A function of the user's in place of the mean."""
    use_rollout_logprobs: bool = False
    """The rollout's log-probabilities stand for the old policy's."""
    get_mismatch_metrics: bool = False
    """Log the numbers of use_tis without it; no number of the loss depends on it."""
    calculate_per_token_loss: bool = False
    """Divide by tokens of the step, in place of a mean over samples of the sample's token mean."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> SlimeSettings:
        if self.tis_clip_low > self.tis_clip:
            raise ValueError("tis_clip_low is above tis_clip")
        return self


def translate(settings: SlimeSettings) -> Translation:
    """Its policy loss on a whole step."""
    for option in ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
        if getattr(settings, option):
            raise SpecError(
                f"slime: {option}",
                found=getattr(settings, option),
                rule="a function of the user's own is no setting",
                fix="express it with settings here",
            )
    kind = {"gspo": "gspo", "cispo": "cispo"}.get(settings.advantage_estimator, "ppo")
    anchor = "sampler" if settings.use_rollout_logprobs else "old"
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    surrogate = {"kind": kind, "clip_low": settings.eps_clip, "clip_high": high, "anchor": anchor}
    notes = ["a micro-batch yields a sum; the step divides it"]
    if settings.eps_clip_c is not None and kind == "cispo":
        notes.append("eps_clip_c is ignored by cispo")
    elif settings.eps_clip_c is not None:
        surrogate["dual_clip"] = settings.eps_clip_c
    correction: dict[str, Any] = {}
    if settings.use_tis:
        correction = {"kind": "tis", "ratio_low": settings.tis_clip_low or None, "ratio_high": settings.tis_clip}
    if settings.use_opsm and settings.opsm_delta is not None:
        correction |= {"opsm_threshold": settings.opsm_delta, "opsm_anchor": anchor}
        notes.append("rejected samples stay in the denominator and keep their KL term")
    kl: dict[str, Any] = {}
    if settings.use_kl_loss and settings.kl_loss_coef and settings.kl_loss_type is not None:
        low_var = settings.kl_loss_type == "low_var_kl"
        kl = {
            "coefficient": settings.kl_loss_coef,
            "estimator": "k3" if low_var else settings.kl_loss_type,
            "output_clamp": KL_CLAMP if low_var else None,
        }
        if settings.use_unbiased_kl:
            kl |= {"importance": anchor, "gradient": "score"}
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        correction=correction,
        kl=kl,
        entropy_coefficient=settings.entropy_coef,
        denominator="token" if settings.calculate_per_token_loss else "document",
        documents_counted="trained" if settings.calculate_per_token_loss else "all",
        scaling=CONTRACTS["slime"]["per token" if settings.calculate_per_token_loss else "per sample"],
    )
    return Translation(spec, tuple(notes))


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of its policy loss."""
    surrogate, correction, kl = spec.surrogate, spec.correction, spec.kl
    estimators = {"ppo": "grpo", "gspo": "gspo", "cispo": "cispo"}
    if surrogate.kind not in estimators:
        raise refuse("slime", f"the surrogate {surrogate.kind!r}", "its losses are ppo, gspo and cispo")
    low_var = kl.estimator == "k3" and kl.output_clamp is not None
    settings = {
        "advantage_estimator": estimators[surrogate.kind],
        "eps_clip": 1.0 if surrogate.clip_low is None else surrogate.clip_low,
        "eps_clip_high": surrogate.clip_high,
        "eps_clip_c": surrogate.dual_clip,
        "use_rollout_logprobs": surrogate.anchor == "sampler",
        "use_kl_loss": bool(kl.coefficient),
        "kl_loss_coef": kl.coefficient,
        "kl_loss_type": "low_var_kl" if low_var else kl.estimator if kl.coefficient else "k1",
        "use_unbiased_kl": kl.importance != "none",
        "entropy_coef": spec.entropy_coefficient,
        "use_tis": correction.ratio != "none",
        "calculate_per_token_loss": spec.denominator == "token",
        "use_opsm": correction.opsm_threshold is not None,
    }
    if correction.opsm_threshold is not None:
        settings["opsm_delta"] = correction.opsm_threshold
    if correction.ratio != "none" and correction.ratio_high is not None:
        settings |= {"tis_clip": correction.ratio_high, "tis_clip_low": correction.ratio_low or 0.0}
    return checked_back("slime", spec, SlimeSettings, translate, settings)


def micro_batch_sums(_: SlimeSettings) -> GivenCounts:
    """What its loss function returns is not divided yet: one sample and one token."""
    return GivenCounts(tokens=1, documents=1)


def case_settings(case: Case) -> dict[str, Any]:
    """Functions say the estimator; a threshold or an estimator that is given is used."""
    estimator = next((name for name in ("gspo", "cispo") if f"compute_{name}" in case.function), "grpo")
    return {
        "advantage_estimator": estimator,
        "use_opsm": case.config.get("opsm_delta") is not None,
        "use_kl_loss": case.config.get("kl_loss_type") is not None,
        **case.config,
    }


def policy_loss(case: Case) -> dict[str, Any]:
    """Its policy loss. ``sample_denominators``, one a sample, stand for the samples' own numbers of trained tokens.

    slime gives all samples of a rollout the trained tokens of the rollout. The ratios of samples and off-policy
    sequence masking look at the sample's own tokens as before, and a loss per token at none of this.
    """
    given = case.get("sample_denominators")
    settings = policy_settings(case)
    if given is None or settings.calculate_per_token_loss:
        return replays.policy_loss(case)
    if settings.advantage_estimator == "gspo" and settings.use_tis:
        raise SpecError(
            "replay of slime's gspo with use_tis and sample_denominators",
            found="ois, a mean over samples of ratios of samples",
            rule="that number is computed here with the samples' own tokens alone",
            fix="leave use_tis or sample_denominators out",
        )
    given_T = case.of_documents("sample_denominators")
    leaf = case["logprobs"].clone().requires_grad_()
    shares_T = length_shares(case.row().lengths_T, given_T)
    found = evaluate_case(case, silent(leaf.reshape(-1), case.tokens("entropies")), extensions={LOSS_WEIGHTS: shares_T})
    return finish(replace(found, inputs=replace(found.inputs, lengths_T=given_T)), {"grad_logprobs": leaf})


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Sums of one micro-batch."""
    return settings_of(replayed.translation.spec, replayed.slots)._replace(num_documents=1)


def further_metrics(replayed: Replayed) -> dict[str, float]:
    """A KL that is only reported, and the share that off-policy sequence masking took out, as slime counts it."""
    correction = replayed.translation.spec.correction
    found = _unweighted_kl(replayed)
    if correction.opsm_threshold is not None:
        advantages_T = replayed.case.spread("advantages").reshape(-1)
        own = replace(replayed.inputs, lengths_T=replayed.row.lengths_T)
        found["opsm_clipfrac"] = opsm_clipfrac(own, advantages_T, correction.opsm_threshold, correction.opsm_anchor)
    return found


def _unweighted_kl(replayed: Replayed) -> dict[str, float]:
    """kl_loss where use_kl_loss has the coefficient 0: the loss has no such term, and slime reports it."""
    if not replayed.settings.use_kl_loss or replayed.settings.kl_loss_coef:
        return {}
    spec = translate(replayed.settings.model_copy(update={"kl_loss_coef": 1.0})).spec
    named = aliases.as_named_by(
        "slime",
        replayed.inputs,
        replayed.row.loss_mask_T,
        loss_spec=spec,
        terms={**replayed.evaluated.terms, "kl": kl_term(replayed.inputs, spec.kl)},
        slots=replayed.slots,
        settings=peer_settings(replayed),
    )
    return {"kl_loss": named["kl_loss"].finish()}


# ---- what is no policy loss ------------------------------------------------------------------------------------


class LogprobSettings(Settings):
    """`_VocabParallelLogProbEntropy` (slime/utils/ppo_utils.py, 624b824a)."""

    keep_mask: bool = False
    """Log-probabilities among the tokens that the sampler kept; the entropy stays that of the whole vocabulary."""
    entropy_grad: bool = True
    """The entropy carries a gradient."""


class GAESettings(Settings):
    """`vanilla_gae` (slime/utils/ppo_utils.py, 624b824a); `chunked_gae` is the same number."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda."""


def logprobs(case: Case) -> dict[str, Any]:
    """Log-probabilities of the targets, and entropies."""
    settings = parse_settings(LogprobSettings, case.config, where="slime")
    leaf = case["logits"].clone().requires_grad_()
    logits_TV, targets_T = leaf.reshape(-1, leaf.shape[-1]), case["targets"].reshape(-1)
    said = whole = token_logprobs_from_logits(logits_TV, targets_T)
    if settings.keep_mask:
        kept_TV = _kept(case).reshape(logits_TV.shape).bool()
        said = token_logprobs_from_logits(kept_logits(logits_TV, kept_TV, targets_T), targets_T)
    through, cotangents = [said.logprobs_T], [case["cotangent_logprobs"].reshape(-1)]
    if settings.entropy_grad and case.get("cotangent_entropy") is not None:
        through, cotangents = [*through, whole.entropy_T], [*cotangents, case["cotangent_entropy"].reshape(-1)]
    torch.autograd.backward(through, cotangents)
    return {"logprobs": case.shaped(said.logprobs_T), "entropy": case.shaped(whole.entropy_T), "grad_logits": leaf.grad}


def _kept(case: Case) -> torch.Tensor:
    """What the sampler kept: the input that has a flag for every logit."""
    return case[next(iter(flags_of_logits(case)), "keep_mask")]


def advantage(case: Case) -> dict[str, Any]:
    """Generalised advantage estimation, every token of a row trained."""
    settings = parse_settings(GAESettings, case.config, where="slime")
    rewards, values = case["token_rewards"], case["values"]
    advantages_T, returns_T = gae(
        rewards.reshape(-1),
        values.reshape(-1),
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
    scaling=CONTRACTS["slime"],
    replays={
        "policy_loss": policy_loss,
        "policy_loss_packed": policy_loss,
        "logprobs": logprobs,
        "advantage": advantage,
    },
)
