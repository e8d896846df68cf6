"""From options of AReaL to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.areal.settings import ArealSettings, RejectionSettings
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back, unsupported

CONTRACTS: Mapping[str, ScalingSpec] = {
    # The mean of a micro-batch, times its share of the tokens: the mean of all.
    "fsdp": ScalingSpec(multiplied_by=("dp",), engine_divides=("dp",)),
}


GATES = {"ratio": "ratio", "kl_k1": "k1", "kl_k2": "k2", "kl_k3": "inverse_k3", "binary_kl": "binary_kl"}
"""Metric of AReaL -> statistic of a gate. That of kl_k1 has the opposite sign here."""


def translate(settings: ArealSettings) -> Translation:
    """Translate the actor's loss: a sum over tokens, divided by the tokens that trained before any rejection."""
    sequence = settings.importance_sampling_level == "sequence"
    rejection = settings.rejection_sampling
    notes = [] if rejection is None else ["rejected tokens stay in the denominator"]
    if settings.use_cispo_loss or (rejection is not None and rejection.metric == "binary_kl"):
        notes.append("use_cispo_loss and the metric binary_kl are of commit cbff54d6: release 1.0.4 has neither")
    if rejection is not None and rejection.action == "clamp" and rejection.metric != "ratio":
        notes.append("release 1.0.4 clamps by the metric ratio alone, and refuses others")
    if settings.m2_threshold is not None:
        raise SpecError(
            "AReaL: m2_threshold",
            found=str(settings.m2_threshold),
            rule="its filter changes the mask before the loss counts its tokens, and sorts a micro-batch; "
            "here a correction rejects and the count is of the whole step",
            fix="leave it out, and set correction.m2_threshold of the spec",
        )
    if settings.use_cispo_loss:
        surrogate = _cispo(settings)
    elif settings.use_sapo_loss:
        if rejection is not None:
            raise SpecError(
                "AReaL: use_sapo_loss with rejection_sampling",
                rule="its SAPO takes no correction",
                fix="drop one of them",
            )
        surrogate = {"kind": "sapo", "tau_positive": settings.sapo_tau_pos, "tau_negative": settings.sapo_tau_neg}
        surrogate["level"] = "document" if sequence else "token"
    else:
        high = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
        clip = {"clip_low": settings.eps_clip, "clip_high": high, "dual_clip": settings.c_clip}
        surrogate = {"kind": "gspo" if sequence else "ppo", **clip}
    if sequence and not settings.use_cispo_loss:
        surrogate["advantage_level"] = "document"
        notes += ["advantages are averaged over the sequence", "a sequence is weighted by its length"]
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        denominator="token",
        compat={"scaling": CONTRACTS["fsdp"]},
        correction={} if rejection is None else correction(rejection, sequence),
    )
    return Translation(spec, tuple(notes))


def _cispo(settings: ArealSettings) -> dict[str, Any]:
    if settings.use_sapo_loss or settings.importance_sampling_level == "sequence":
        raise SpecError(
            "AReaL: use_cispo_loss",
            found="use_sapo_loss or a ratio of sequences",
            rule="CISPO is a separate loss, of tokens",
            fix="drop one of them",
        )
    if settings.eps_clip_higher is None or settings.eps_clip_higher == 0:
        raise SpecError(
            "AReaL: use_cispo_loss",
            found=f"eps_clip_higher = {settings.eps_clip_higher}",
            rule="its upper bound has no default",
            fix="give eps_clip_higher",
        )
    return {"kind": "cispo", "clip_low": settings.eps_clip, "clip_high": settings.eps_clip_higher}


def correction(rejection: RejectionSettings, of_sequences: bool) -> dict[str, Any]:
    """Return rejection as settings of a correction; a surrogate's ratio of sequences is over the tokens it keeps."""
    bounds = {"ratio_low": rejection.lower, "ratio_high": rejection.upper}
    if rejection.level == "token" and rejection.action == "clamp":
        return {"ratio": "token", **bounds}
    low: float | None = rejection.lower
    high: float | None = rejection.upper
    level = "token" if rejection.level == "token" else f"document_{rejection.agg}"
    if rejection.metric == "kl_k1":
        low, high = -rejection.upper, None if rejection.lower is None else -rejection.lower
        level = {"document_max": "document_min"}.get(level, level)
    whole_sequence = rejection.level == "sequence" and rejection.metric == "ratio"
    fields = {
        "ratio": "document_mean" if whole_sequence else "token",
        "gate": GATES[rejection.metric],
        "gate_level": level,
        "gate_low": low,
        "gate_high": high,
    }
    if rejection.action == "clamp":
        return {**fields, "gate_action": "truncate", **bounds}
    return {**fields, "surrogate_over": "kept"} if of_sequences else fields


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of the actor's loss for a spec."""
    surrogate = spec.surrogate
    if surrogate.kind not in ("ppo", "gspo", "sapo", "cispo"):
        raise unsupported("AReaL", f"the surrogate {surrogate.kind!r}", "its losses are PPO, GSPO, SAPO and CISPO")
    settings: dict[str, Any] = {
        "importance_sampling_level": "sequence" if surrogate.get("level") == "document" else "token",
        "use_sapo_loss": surrogate.kind == "sapo",
        "use_cispo_loss": surrogate.kind == "cispo",
        "rejection_sampling": rejection_of(spec),
    }
    if surrogate.kind == "sapo":
        settings |= {"sapo_tau_pos": surrogate.get("tau_positive"), "sapo_tau_neg": surrogate.get("tau_negative")}
    else:
        settings |= {
            # No lower bound is a length of 1: a ratio is never below 0.
            "eps_clip": 1.0 if surrogate.get("clip_low") is None else surrogate.get("clip_low"),
            "eps_clip_higher": surrogate.get("clip_high"),
            "c_clip": surrogate.get("dual_clip"),
        }
    return checked_back("AReaL", spec, ArealSettings, translate, settings)


def rejection_of(spec: LossSpec) -> dict[str, Any] | None:
    """Return the options of rejection that are closest to a correction; None without a correction."""
    ours = spec.correction
    if not ours.acts:
        return None
    if ours.gate == "none":
        upper = 5.0 if ours.ratio_high is None else ours.ratio_high
        return {"action": "clamp", "upper": upper, "lower": ours.ratio_low}
    metric = next((key for key, name in GATES.items() if name == ours.gate), "ratio")
    low, high = ours.gate_low, ours.gate_high
    level: str = ours.gate_level
    if metric == "kl_k1":
        low, high = None if high is None else -high, None if low is None else -low
        level = {"document_min": "document_max"}.get(level, level)
    return {
        "level": "token" if level == "token" else "sequence",
        "agg": "mean" if level == "token" else level.removeprefix("document_"),
        "action": "clamp" if ours.gate_action == "truncate" else "mask",
        "metric": metric,
        "upper": 5.0 if high is None else high,
        "lower": low,
    }
