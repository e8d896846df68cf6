"""From options of OpenRLHF/OpenRLHF to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import CorrectionSpec, LossSpec, ScalingSpec
from workbench.systems.openrlhf.settings import LOG_CLAMP, OUTPUT_CLAMP, AggregateSettings, PolicySettings
from workbench.systems.registry import Translation
from workbench.systems.translate import bounded_correction, bounds_of, checked_back

CONTRACTS: Mapping[str, ScalingSpec] = {
    # Counts are divided by accumulation steps, which DeepSpeed divides by once more.
    "deepspeed": ScalingSpec(multiplied_by=("dp", "micro_batches"), engine_divides=("micro_batches", "dp")),
}


EPSILON = 1e-8
"""Added to the length of a row."""


SCALING: ScalingSpec = CONTRACTS["deepspeed"].model_copy(update={"length_epsilon": EPSILON})
"""Counts of the whole batch; 1e-8 is added to a row's length."""


def is_by_token(settings: AggregateSettings) -> bool:
    """True if the loss is a mean over tokens, not rows."""
    return settings.token_level_loss and getattr(settings, "policy_loss_type", "ppo") == "ppo"


def translate(settings: PolicySettings) -> Translation:
    """Translate the clipped loss of tokens or of rows."""
    sequence, corrected = settings.policy_loss_type == "gspo", settings.is_correction_level != "off"
    clip = {"clip_low": settings.clip_eps_low, "clip_high": settings.clip_eps_high, "dual_clip": settings.dual_clip}
    of_rows = {"kind": "gspo", "anchor": "sampler" if corrected else "old"}
    surrogate = {**clip, **(of_rows if sequence else {"kind": "ppo", "log_clamp": LOG_CLAMP})}
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        correction=_correction(settings),
        denominator="token" if is_by_token(settings) else "document",
        kl=_penalty(settings),
        entropy_coefficient=settings.entropy_coef or 0.0,
        compat={"scaling": SCALING, **_of_penalties(settings)},
    )
    return Translation(spec, tuple(_notes(settings)), ("dp_size", "batch_num_tokens", "global_batch_size"))


def _penalty(settings: PolicySettings) -> dict[str, Any]:
    """Return the KL penalty in the loss."""
    kl = settings.kl
    if not kl.use_loss or not kl.init_coef:
        return {}
    if kl.unbiased_gradient:
        raise SpecError(
            "OpenRLHF's kl.unbiased_gradient in the loss",
            rule="its weight policy / old is capped and has no gradient, which no spec has",
            fix="leave the option out",
        )
    return {"coefficient": kl.init_coef, "estimator": kl.estimator, "output_clamp": OUTPUT_CLAMP}


def _of_penalties(settings: PolicySettings) -> dict[str, str]:
    """Return the denominators of the penalties, for which `training_step` calls `aggregate_loss` by its default."""
    of = {"kl_denominator": settings.kl.use_loss, "entropy_denominator": bool(settings.entropy_coef)}
    return {name: "token" for name, given in of.items() if given}


GATES = {"binary_kl": "sampler_binary_kl", "tv": "total_variation"}
"""Divergence that is bounded -> statistic of a gate."""


def _correction(settings: PolicySettings) -> dict[str, Any]:
    level, (low, high) = settings.is_correction_level, settings.is_correction_threshold
    if level == "off" or settings.policy_loss_type == "gspo":
        return {}
    if settings.is_correction_gating in GATES:
        return {
            "kind": "importance_sampling",
            "gate": GATES[settings.is_correction_gating],
            "gate_level": "document_mean" if level == "seq" else "token",
            "gate_low": low,
            "gate_high": high,
        }
    kind = "seq-mask-tis" if level == "seq" else "tis" if settings.is_correction_mode == "clip" else "icepop"
    return bounded_correction(kind, low, high)


def _notes(settings: PolicySettings) -> list[str]:
    """Return what it does implicitly."""
    notes = _own_notes(settings)
    if (settings.kl.use_loss or settings.entropy_coef) and not is_by_token(settings):
        notes.append("the trainer's penalties are means over tokens, whatever divides the policy term")
    return notes


def _own_notes(settings: PolicySettings) -> list[str]:
    corrected = settings.is_correction_level != "off"
    if settings.policy_loss_type == "ppo":
        notes = ["the log ratio is clamped to +-20"]
        if corrected and settings.is_correction_level == "seq":
            notes.append("rows that are kept have untruncated weights")
        if corrected and settings.is_correction_gating == "binary_kl":
            notes.append("a divergence that rounds to less than 0 is outside the lower bound 0: its token is dropped")
        return notes
    notes = ["gspo is a mean over rows, for any token_level_loss"]
    if corrected:
        notes.append("gspo takes its ratio against the sampler; all other options of is_correction have no effect")
    return notes


def back(spec: LossSpec) -> dict[str, Any]:
    """Return options of the clipped loss; up to the 1e-8 that it adds to lengths, and to ratios beyond e^20."""
    surrogate, correction = spec.surrogate, spec.correction
    if surrogate.kind not in ("ppo", "gspo"):
        raise SpecError(
            f"options of OpenRLHF for the surrogate {surrogate.kind!r}",
            rule="its losses are ppo and gspo",
            fix="choose one of them, or another system",
        )
    settings: dict[str, Any] = {
        "policy_loss_type": surrogate.kind,
        "clip_eps_low": surrogate.get("clip_low"),
        "clip_eps_high": surrogate.get("clip_high"),
        "dual_clip": surrogate.get("dual_clip"),
        "token_level_loss": spec.denominator == "token",
    }
    if spec.kl.coefficient:
        settings["kl"] = {"use_loss": True, "init_coef": spec.kl.coefficient, "estimator": spec.kl.estimator}
    if spec.entropy_coefficient:
        settings["entropy_coef"] = spec.entropy_coefficient
    if surrogate.kind == "gspo" and surrogate.get("anchor") == "sampler":
        settings["is_correction_level"] = "token"
    elif correction.acts:
        settings |= _correction_back(correction)
    return checked_back("OpenRLHF", _with_defaults(spec), PolicySettings, translate, settings)


def _correction_back(correction: CorrectionSpec) -> dict[str, Any]:
    """Return the options of the correction that is closest to a spec's."""
    statistic = next((option for option, gate in GATES.items() if gate == correction.gate), "ratio")
    if statistic == "ratio":
        kind, *bounds = bounds_of(correction)
        level, mode = "seq" if kind == "seq-mask-tis" else "token", "clip" if kind == "tis" else "mask"
    else:
        bounds = [correction.gate_low, correction.gate_high]
        level, mode = "token" if correction.gate_level == "token" else "seq", "mask"
    if None in bounds:
        raise SpecError(
            "options of OpenRLHF for a correction with one bound",
            found=f"{bounds[0]} to {bounds[1]}",
            rule="is_correction_threshold has two bounds",
            fix="give both",
        )
    return {
        "is_correction_level": level,
        "is_correction_mode": mode,
        "is_correction_gating": statistic,
        "is_correction_threshold": tuple(bounds),
    }


def _with_defaults(spec: LossSpec) -> LossSpec:
    """Return the spec with OpenRLHF's own setting wherever it has no effect, or only that of an epsilon."""
    changes: dict[str, Any] = {}
    if spec.denominator == "token" or spec.compat.scaling.length_epsilon <= EPSILON:
        scaling = spec.compat.scaling.model_copy(update={"length_epsilon": EPSILON})
        changes["compat"] = spec.compat.model_copy(update={"scaling": scaling})
    if spec.surrogate.kind == "ppo" and spec.surrogate.get("log_clamp") is None:
        changes["surrogate"] = spec.surrogate.model_copy(update={"log_clamp": LOG_CLAMP})
    return spec.model_copy(update=changes)


def counts(settings: AggregateSettings) -> GivenCounts:
    """Return the global count of the loss's denominator, and the ranks; both or neither."""
    by_token = is_by_token(settings)
    count = settings.batch_num_tokens if by_token else settings.global_batch_size
    if count is None:
        return GivenCounts()
    tokens, documents = (count, None) if by_token else (None, count)
    return GivenCounts(tokens, documents, dp=settings.dp_size)
