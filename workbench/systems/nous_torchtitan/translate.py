"""From options of the GRPO step of NousResearch/torchtitan to a spec, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.nous_torchtitan.settings import ESTIMATORS, ROWS, NousSettings, RolloutISSettings
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back, unsupported

CONTRACTS: Mapping[str, ScalingSpec] = {
    # Each micro-batch is a mean of its own; FSDP averages. Context parallelism was not read.
    "fsdp": ScalingSpec(counts="micro_batch", divided_by=("micro_batches",), engine_divides=("dp",)),
}


SAFETY_BOUND = 20.0
"""Bound of the log of an importance weight."""


TOKENS = "token mean"


def translate(settings: NousSettings) -> Translation:
    """Translate the loss of the step, reduced as the trainer does."""
    by_token, notes = settings.reduction == TOKENS, []
    if not by_token:
        notes.append("a row without a token makes its mean over rows undefined; here it counts as 0")
    sequence, weights = settings.policy_ratio_type == "sequence", settings.rollout_is
    if weights is not None and weights.rollout_is_threshold is None:
        weights = None
    if settings.logprob_floor is not None and (sequence or weights is not None):
        raise SpecError(
            "nous_torchtitan: onpolicy_logp_threshold with policy_ratio_type sequence or rollout_is",
            found=str(settings.onpolicy_logp_threshold),
            rule="it takes unlikely tokens out of a row's mean, or makes their weight 0, by the log-probability of the "
            "live policy, and leaves them in the loss; no setting here does",
            fix="drop one of them",
        )
    if settings.logprob_floor is not None:
        notes.append("onpolicy_logp_threshold acts on metrics only")
    if sequence:
        notes.append(
            "its gradient is twice that of this loss: the row's mean is not detached next to the token's own term"
        )
    if weights is not None and weights.rollout_is_level == "geometric":
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
        correction={} if weights is None else correction(weights),
        entropy_coefficient=max(settings.entropy_loss_weight, 0.0),
        mean_squared_logit_coefficient=max(settings.logit_loss_weight, 0.0) ** 2,
        denominator="token" if by_token else "document",
        compat={"documents_counted": "trained" if by_token else "all", "scaling": CONTRACTS["fsdp"]},
    )
    return Translation(spec, tuple(notes))


def correction(weights: RolloutISSettings) -> dict[str, Any]:
    """Return importance weights as settings of a correction."""
    ratio = {"token": "token", "sequence": "document_sum", "geometric": "document_mean"}[weights.rollout_is_level]
    spec = {"ratio": ratio, "ratio_high": weights.rollout_is_threshold, "log_clamp": SAFETY_BOUND, "unsampled": "drop"}
    if weights.rollout_is_mode == "mask":
        spec |= {"ratio_low": weights.lower, "outside": "zero"}
    if weights.rollout_is_veto_threshold is not None:
        spec |= {"gate": "ratio", "gate_level": "document_min", "gate_low": weights.rollout_is_veto_threshold}
    return spec


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of the step for a spec."""
    surrogate, weights = spec.surrogate, spec.correction
    if surrogate.kind not in ("ppo", "gspo"):
        raise unsupported(
            "the torchtitan fork", f"the surrogate {surrogate.kind!r}", "it clips ratios of tokens or of rows"
        )
    settings: dict[str, Any] = {
        "reduction": TOKENS if spec.denominator == "token" else ROWS,
        "policy_ratio_type": "token" if surrogate.kind == "ppo" else "sequence",
        "clip_ratio_lower_bound": surrogate.clip_low,
        "clip_ratio_upper_bound": surrogate.clip_high,
        "use_ref_model": bool(spec.kl.coefficient),
        "kl_beta": spec.kl.coefficient,
        "kl_estimator_type": next((key for key, name in ESTIMATORS.items() if name == spec.kl.estimator), "k3"),
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
