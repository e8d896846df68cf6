"""From options of OpenRLHF/OpenRLHF to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.openrlhf.settings import LOG_CLAMP, AggregateSettings, PolicySettings
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
    sequence, corrected = settings.policy_loss_type == "gspo", settings.enable_vllm_is_correction
    clip = {"clip_low": settings.clip_eps_low, "clip_high": settings.clip_eps_high, "dual_clip": settings.dual_clip}
    of_rows = {"kind": "gspo", "anchor": "sampler" if corrected else "old"}
    surrogate = {**clip, **(of_rows if sequence else {"kind": "ppo", "log_clamp": LOG_CLAMP})}
    spec = LossSpec(
        name="grpo",
        surrogate=surrogate,
        correction=_correction(settings),
        denominator="token" if is_by_token(settings) else "document",
        compat={"scaling": SCALING},
    )
    return Translation(spec, tuple(_notes(settings)), ("dp_size", "batch_num_tokens", "global_batch_size"))


def _correction(settings: PolicySettings) -> dict[str, Any]:
    if not settings.enable_vllm_is_correction or settings.policy_loss_type == "gspo":
        return {}
    low, high = settings.vllm_is_truncated_threshold or (None, None)
    return bounded_correction(settings.vllm_is_correction_type, low, high)


def _notes(settings: PolicySettings) -> list[str]:
    """Return what it does implicitly."""
    if settings.policy_loss_type == "ppo":
        notes = ["the log ratio is clamped to +-20"]
        if settings.enable_vllm_is_correction and settings.vllm_is_correction_type == "seq-mask-tis":
            notes.append("rows that are kept have untruncated weights")
        return notes
    notes = ["gspo is a mean over rows, for any token_level_loss"]
    if settings.enable_vllm_is_correction:
        notes.append("gspo takes its ratio against the sampler; vllm_is_correction_type and its bounds have no effect")
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
    if surrogate.kind == "gspo" and surrogate.get("anchor") == "sampler":
        settings["enable_vllm_is_correction"] = True
    elif correction.acts:
        kind, *bounds = bounds_of(correction)
        if None in bounds:
            raise SpecError(
                "options of OpenRLHF for a correction with one bound",
                found=f"{bounds[0]} to {bounds[1]}",
                rule="it has a lower and an upper one",
                fix="give both",
            )
        settings |= {
            "enable_vllm_is_correction": True,
            "vllm_is_correction_type": kind,
            "vllm_is_truncated_threshold": tuple(bounds),
        }
    return checked_back("OpenRLHF", _with_defaults(spec), PolicySettings, translate, settings)


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
