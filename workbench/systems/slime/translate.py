"""From options of THUDM/slime to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.registry import Translation
from workbench.systems.slime.settings import SlimeSettings
from workbench.systems.translate import checked_back, unsupported

CONTRACTS: Mapping[str, ScalingSpec] = {
    "per sample": ScalingSpec(multiplied_by=("micro_batches", "dp_cp"), engine_divides=("micro_batches", "dp_cp")),
    # An empty sample counts as a token. Every cp rank counts the whole sequence.
    "per token": ScalingSpec(multiplied_by=("cp",), engine_divides=("cp",), least_tokens=1),
}


KL_CLAMP = 10.0
"""low_var_kl: bound of the estimate."""


def translate(settings: SlimeSettings) -> Translation:
    """Translate its policy loss on a whole step."""
    for option in ("custom_tis_function_path", "custom_pg_loss_reducer_function_path"):
        if getattr(settings, option):
            raise SpecError(
                f"slime: {option}",
                found=getattr(settings, option),
                rule="a user function is no setting",
                fix="express it with settings here",
            )
    by_token = settings.calculate_per_token_loss
    kind = {"gspo": "gspo", "cispo": "cispo"}.get(settings.advantage_estimator, "ppo")
    anchor = "sampler" if settings.use_rollout_logprobs else "old"
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    surrogate = {"kind": kind, "clip_low": settings.eps_clip, "clip_high": high, "anchor": anchor}
    notes = ["a micro-batch returns a sum; the step divides it"]
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
        denominator="token" if by_token else "document",
        compat={
            "documents_counted": "trained" if by_token else "all",
            "scaling": CONTRACTS["per token" if by_token else "per sample"],
        },
    )
    return Translation(spec, tuple(notes))


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of its policy loss for a spec."""
    surrogate, correction, kl = spec.surrogate, spec.correction, spec.kl
    estimators = {"ppo": "grpo", "gspo": "gspo", "cispo": "cispo"}
    if surrogate.kind not in estimators:
        raise unsupported("slime", f"the surrogate {surrogate.kind!r}", "its losses are ppo, gspo and cispo")
    low_var = kl.estimator == "k3" and kl.output_clamp is not None
    settings = {
        "advantage_estimator": estimators[surrogate.kind],
        # No lower bound is a length of 1: a ratio is never below 0.
        "eps_clip": 1.0 if surrogate.get("clip_low") is None else surrogate.get("clip_low"),
        "eps_clip_high": surrogate.get("clip_high"),
        "eps_clip_c": surrogate.get("dual_clip"),
        "use_rollout_logprobs": surrogate.get("anchor") == "sampler",
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
    """Return counts of one sample and one token: its loss function returns an undivided sum."""
    return GivenCounts(tokens=1, documents=1)
