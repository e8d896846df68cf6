"""From options of NVIDIA-NeMo/RL to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import KLSpec, LossSpec, ScalingSpec
from workbench.systems.nemo_rl.settings import EPSILON, IN_REWARD, ClippedPGSettings
from workbench.systems.registry import Translation
from workbench.systems.translate import bounded_correction, bounds_of, checked_back

CONTRACTS: Mapping[str, ScalingSpec] = {
    # FSDP averages over dp x cp; the loss is multiplied by both.
    "dtensor": ScalingSpec(multiplied_by=("dp_cp",), engine_divides=("dp_cp",)),
    # Log-probabilities are gathered, so every cp rank has the whole row and the gather's backward adds; Megatron's
    # schedule multiplies by cp / micro-batches, which is undone; gradients are added (calculate_per_token_loss).
    "megatron": ScalingSpec(
        replicated=True,
        divided_by=("cp", "cp"),
        multiplied_by=("micro_batches",),
        engine_multiplies=("cp",),
        engine_divides=("micro_batches",),
    ),
}

GIVEN = ("global_valid_seqs", "global_valid_toks")


def translate(settings: ClippedPGSettings) -> Translation:
    """Translate the clipped loss from its flags."""
    spec = LossSpec(
        name="grpo",
        surrogate=_surrogate(settings),
        correction=_correction(settings),
        kl=_kl(settings),
        old_policy="current" if settings.force_on_policy_ratio else "recorded",
        positive_nll_coefficient=settings.positive_example_nll_weight,
        denominator="token" if settings.token_level_loss else "document",
        compat={"documents_counted": "all", "scaling": SCALING},
    )
    return Translation(spec, tuple(_notes(settings)), GIVEN)


SCALING: ScalingSpec = CONTRACTS["dtensor"].model_copy(
    update={"count_epsilon": EPSILON, "length_epsilon": EPSILON, "mean_epsilon": EPSILON}
)
"""Denominators: counts of the whole batch, each plus 1e-8."""


def _surrogate(settings: ClippedPGSettings) -> dict[str, Any]:
    clip = {"clip_low": settings.ratio_clip_min, "clip_high": settings.ratio_clip_max}
    if settings.force_on_policy_ratio:
        return {"kind": "on_policy"}
    if settings.disable_ppo_ratio:
        return {"kind": "reinforce"}
    if settings.use_cispo:
        return {"kind": "cispo", **clip}
    kind = "gspo" if settings.sequence_level_importance_ratios else "ppo"
    return {"kind": kind, "dual_clip": settings.ratio_clip_c, **clip}


def _correction(settings: ClippedPGSettings) -> dict[str, Any]:
    if not settings.use_importance_sampling_correction:
        return {}
    return bounded_correction(
        settings.truncated_importance_sampling_type,
        settings.truncated_importance_sampling_ratio_min,
        settings.truncated_importance_sampling_ratio,
        "document_sum" if settings.sequence_level_importance_ratios else "token",
    )


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
    """Return what it does implicitly."""
    notes = ["1e-8 is added to every count that divides", "rows without tokens count as rows"]
    without_ratio = settings.disable_ppo_ratio or settings.force_on_policy_ratio
    if without_ratio and settings.ratio_clip_c is not None:
        notes.append("ratio_clip_c has no effect: what it bounds is never above 1")
    if settings.disable_ppo_ratio and settings.force_on_policy_ratio:
        notes.append("disable_ppo_ratio has no effect with force_on_policy_ratio")
    if settings.use_importance_sampling_correction and settings.sequence_level_importance_ratios:
        notes.append(
            "the correction weight of a row is the product of its tokens' ratios, their ratio the geometric "
            "mean; a product that overflows becomes 0, so that the worst row drops out"
        )
    elif settings.use_importance_sampling_correction:
        notes.append("a correction weight that overflows becomes 0, for any upper bound")
    if settings.use_kl_in_reward:
        notes.append("clamps of the penalty in the reward are 20 and 10, for any options")
        notes.append("the penalty is in the advantages that the loss receives, and no term of the loss")
    if settings.reference_policy_kl_penalty and not settings.use_kl_in_reward:
        notes.append("the KL penalty includes the gradient of sampling: that of k3 is that of k2")
    if settings.positive_example_nll_weight:
        notes.append(
            "positive_example_nll_weight has no effect on a batch without rewards; otherwise its divisor is "
            "counted in each micro-batch"
        )
    return notes


def back(spec: LossSpec) -> dict[str, Any]:
    """Return options of the clipped loss; up to the 1e-8 that it adds to counts."""
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
    if surrogate.get("clip_high") is not None:
        settings |= {
            "ratio_clip_min": surrogate.get("clip_low"),
            "ratio_clip_max": surrogate.get("clip_high"),
            "ratio_clip_c": surrogate.get("dual_clip"),
        }
    kind, low, high = bounds_of(correction)
    if kind == "seq-mask-tis" or low is not None or high is not None:
        settings |= {
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": high,
            "truncated_importance_sampling_ratio_min": low,
        }
    return checked_back("NeMo-RL", _with_defaults(spec), ClippedPGSettings, translate, settings)


def _with_defaults(spec: LossSpec) -> LossSpec:
    """Return the spec with NeMo-RL's own setting wherever it has no effect, or only that of an epsilon."""
    like = {
        name: getattr(SCALING, name)
        for name in ("count_epsilon", "length_epsilon", "mean_epsilon")
        if getattr(spec.compat.scaling, name) <= EPSILON
    }
    compat: dict[str, Any] = {"scaling": spec.compat.scaling.model_copy(update=like)}
    if spec.denominator == "token":
        compat["documents_counted"] = "all"
    changes: dict[str, Any] = {"compat": spec.compat.model_copy(update=compat)}
    if not spec.kl.coefficient:
        changes["kl"] = KLSpec(**_kl(ClippedPGSettings(reference_policy_kl_penalty=0.0)))
    if spec.surrogate.kind == "on_policy" and not spec.correction.acts:
        changes["old_policy"] = "current"
    return spec.model_copy(update=changes)


def counts(settings: Any) -> GivenCounts:
    """Return the global counts."""
    return GivenCounts(tokens=settings.global_valid_toks, documents=getattr(settings, "global_valid_seqs", None))
