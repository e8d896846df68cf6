"""From options of ServiceNow/PipelineRL to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.pipelinerl.settings import PipelineRLSettings
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back, unsupported

CONTRACTS: Mapping[str, ScalingSpec] = {
    # The divisor is the configured batch size; DeepSpeed divides by accumulation steps and ranks once more.
    "deepspeed": ScalingSpec(engine_divides=("micro_batches", "dp_cp")),
}


def translate(settings: PipelineRLSettings) -> Translation:
    """Translate one step of its loss."""
    notes = []
    surrogates: dict[str, dict[str, Any]] = {
        "ppo": {"kind": "ppo", "clip_low": settings.epsilon_low},
        "reinforce": {"kind": "cispo", "clip_low": None},
        "gspo": {"kind": "gspo", "clip_low": settings.epsilon_low, "advantage_level": "document"},
    }
    rest: dict[str, Any] = {}
    if settings.policy_loss == "gspo":
        notes += [
            "a document is weighted by its length",
            "advantages are averaged over the document",
            "kl_coef, entropy_bonus, use_advantages and relu_log_p_weights have no effect",
        ]
    else:
        if settings.kl_now:
            clamp = settings.clamp_log_ratio_ref_new_value
            rest["kl"] = {"coefficient": settings.kl_now, "estimator": "k3", "input_clamp": clamp}
        rest["entropy_coefficient"] = settings.entropy_now
        rest["signal"] = "advantages" if settings.use_advantages else "rewards"
        rest["signal_floor"] = 0.0 if settings.relu_log_p_weights else None
    if settings.policy_loss == "reinforce":
        notes.append("the weight has no lower bound, and epsilon_low no effect")
    if settings.reward_minus_kl_coef:
        notes.append("reward_minus_kl_coef has no effect")
    if settings.value_loss_coef:
        notes.append("value_loss_coef acts only on a model with a value head; this is the policy's part")
    spec = LossSpec(
        name="grpo",
        surrogate={**surrogates[settings.policy_loss], "clip_high": settings.epsilon_high},
        truncated="silent" if settings.overlong_filtering else "train",
        denominator="group_length" if settings.group_normalization else "document_sum",
        compat={"documents_counted": "all", "scaling": CONTRACTS["deepspeed"]},
        **rest,
    )
    return Translation(spec, tuple(notes), ("current_step", "max_step", "packed"))


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of its loss for a spec, with constant schedules."""
    kind, surrogate = spec.surrogate.kind, spec.surrogate
    losses = {"ppo": "ppo", "cispo": "reinforce", "gspo": "gspo"}
    if kind not in losses:
        raise unsupported("PipelineRL", f"the surrogate {kind!r}", "its losses are ppo, reinforce (truncated) and gspo")
    settings: dict[str, Any] = {
        "policy_loss": losses[kind],
        "epsilon_high": surrogate.get("clip_high"),
        # Only reinforce has no lower bound, and it ignores the option: its default.
        "epsilon_low": 0.2 if surrogate.get("clip_low") is None else surrogate.get("clip_low"),
        "kl_coef": spec.kl.coefficient,
        "final_kl_coef": spec.kl.coefficient,
        "clamp_log_ratio_ref_new_value": spec.kl.input_clamp or 10,
        "entropy_bonus": spec.entropy_coefficient,
        "final_entropy_bonus": spec.entropy_coefficient,
        "use_advantages": spec.signal == "advantages",
        "relu_log_p_weights": spec.signal_floor == 0,
        "overlong_filtering": spec.truncated == "silent",
        "group_normalization": spec.denominator == "group_length",
    }
    return checked_back("PipelineRL", spec, PipelineRLSettings, translate, settings)


def counts(settings: PipelineRLSettings) -> GivenCounts | None:
    """Return the configured number of documents."""
    return GivenCounts(documents=settings.batch_size) if settings.batch_size else None
