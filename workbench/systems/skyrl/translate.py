"""From options of NovaSky-AI/SkyRL to a spec, and back.

Its trainer divides the advantages by the count of the whole mini-batch, and its losses are plain sums
(`apply_loss_reduction_to_advantages_minibatch`, skyrl/backends/skyrl_train/utils/ppo_utils.py, 0.3.0): the policy term
has that denominator. Its penalties are means of their own, of each micro-batch (`_forward_backward_micro`,
workers/worker.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.specs.losses import CorrectionSpec, LossSpec, ScalingSpec
from workbench.systems.registry import Translation
from workbench.systems.skyrl.settings import GSPO_CAP, LOG_CLAMP, OUTPUT_CLAMP, AlgorithmSettings, CorrectionSettings
from workbench.systems.translate import checked_back, unsupported

TITLE = "SkyRL"

CONTRACTS: Mapping[str, ScalingSpec] = {
    # Ulysses: the gather of log-probabilities multiplies its gradient by the ranks that share a row (`Gather`).
    "fsdp": ScalingSpec(multiplied_by=("dp",), replicated=True, engine_divides=("dp_cp",)),
    # `grad_sum_correction_factor` of megatron_model_wrapper.py: the schedule divides by micro-batches.
    "megatron": ScalingSpec(
        multiplied_by=("dp", "micro_batches"), engine_multiplies=("cp",), engine_divides=("micro_batches", "dp_cp")
    ),
    "token_mean_legacy": ScalingSpec(
        counts="micro_batch",
        multiplied_by=("dp",),
        divided_by=("dp", "micro_batches"),
        replicated=True,
        engine_divides=("dp_cp",),
    ),
}

DENOMINATORS = {
    "token_mean": "token",
    "token_mean_legacy": "token",
    "sequence_mean": "document",
    "seq_mean_token_sum_norm": "constant",
    "prompt_mean": "prompt_group",
}
"""loss_reduction -> `LossSpec.denominator`."""

REFUSED = {
    "clip_cov": "its band is of covariances with advantages that the trainer has divided by the loss's count",
    "kl_cov": "its penalty is a sum over tokens that nothing divides, next to a policy term that is a mean",
}
"""Policy loss without a translation -> the reason."""


def translate(settings: AlgorithmSettings) -> Translation:
    """Translate the policy loss with its penalties."""
    _check(settings)
    kind = settings.policy_loss_type
    penalised = settings.use_kl_loss and settings.kl_loss_coef > 0
    by_legacy = settings.loss_reduction == "token_mean_legacy"
    compat = {
        "documents_counted": "all",
        "kl_denominator": "document" if penalised else "penalty",
        "entropy_denominator": "local_token" if settings.use_entropy_loss else "penalty",
        "scaling": CONTRACTS["token_mean_legacy" if by_legacy else "fsdp"],
    }
    fields: dict[str, Any] = {"denominator": DENOMINATORS[settings.loss_reduction]}
    if settings.loss_reduction == "seq_mean_token_sum_norm":
        fields["denominator_constant"] = settings.max_seq_len
    if penalised or settings.use_kl_in_reward:
        clamps = {"input_clamp": LOG_CLAMP, "output_clamp": OUTPUT_CLAMP}
        fields["kl"] = {
            "coefficient": settings.kl_loss_coef,
            "estimator": settings.kl_estimator_type,
            "placement": "loss" if penalised else "reward",
            **(clamps if settings.kl_estimator_type == "k3" else {}),
        }
    if settings.use_entropy_loss:
        fields["entropy_coefficient"] = settings.entropy_loss_coef
    if kind == "rollout_is":
        fields |= {"old_policy": "current", "correction": _rollout_is(settings)}
    else:
        fields["correction"] = _correction(_corrected(settings))
    spec = LossSpec(name="ppo", surrogate=_surrogate(settings), compat=compat, **fields)
    return Translation(spec, tuple(_notes(settings, spec)))


def _check(settings: AlgorithmSettings) -> None:
    kind, correction = settings.policy_loss_type, _corrected(settings)
    of_rows = correction.tis_ratio_type == "sequence" or correction.sequence_mask_metric is not None
    acts = of_rows or correction.tis_ratio_type is not None or correction.masks_tokens or _outliers(correction)
    problems = (
        (kind in REFUSED, f"policy_loss_type {kind}", REFUSED.get(kind, ""), "choose another loss"),
        (
            settings.advantage_batch_normalize,
            "advantage_batch_normalize",
            "SkyRL whitens over all positions, padding included, which a batch of documents does not have",
            "give the whitened advantages, and leave the option out",
        ),
        (
            settings.loss_reduction == "seq_mean_token_sum_norm" and settings.max_seq_len is None,
            "seq_mean_token_sum_norm without max_seq_len",
            "SkyRL divides by max_seq_len, which has no default",
            "set max_seq_len",
        ),
        (
            kind == "dual_clip" and settings.clip_ratio_c <= 1,
            f"clip_ratio_c = {settings.clip_ratio_c:g}",
            "the dual clip is greater than 1",
            "correct the option",
        ),
        (
            kind == "rollout_is" and acts,
            "rollout_is with off_policy_correction",
            "rollout_is is the correction already: a spec has one weight",
            "leave one of them out",
        ),
        (
            correction.masks_tokens and of_rows,
            "token_mask_is_threshold with a ratio of rows",
            "SkyRL takes the row's ratio over the tokens that the token mask kept",
            "leave one of them out",
        ),
    )
    for found, subject, rule, fix in problems:
        if found:
            raise SpecError(f"{TITLE}'s {subject}", rule=rule, fix=fix)


def _outliers(c: CorrectionSettings) -> bool:
    return (c.outlier_token_is_threshold_low, c.outlier_token_is_threshold_high) != (None, None)


def _corrected(settings: AlgorithmSettings) -> CorrectionSettings:
    """Return the correction with the deprecated options in it, as SkyRL's validation puts them there."""
    if not settings.use_tis:
        return settings.off_policy_correction
    changes = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": settings.tis_imp_ratio_cap}
    return settings.off_policy_correction.model_copy(update=changes)


def _surrogate(settings: AlgorithmSettings) -> dict[str, Any]:
    clip = {"clip_low": settings.eps_clip_low, "clip_high": settings.eps_clip_high}
    clamp = {"log_clamp": LOG_CLAMP}
    dppo = settings.dppo
    surrogates: dict[str, dict[str, Any]] = {
        "regular": {"kind": "ppo", **clip, **clamp},
        "dual_clip": {"kind": "ppo", **clip, **clamp, "dual_clip": settings.clip_ratio_c},
        "gspo": {"kind": "gspo_token", **clip, "log_cap": GSPO_CAP},
        "cispo": {
            "kind": "cispo",
            "bounds": "relative",
            "clip_low": settings.cispo.cispo_eps_clip_low,
            "clip_high": settings.cispo.cispo_eps_clip_high,
            **clamp,
        },
        "sapo": {
            "kind": "sapo",
            "tau_positive": settings.sapo.tau_pos,
            "tau_negative": settings.sapo.tau_neg,
            **clamp,
        },
        "rollout_is": {"kind": "reinforce"},
        "dppo": {
            "kind": dppo.dppo_type.replace("binary", "dppo"),
            "threshold_low": dppo.delta_low,
            "threshold_high": dppo.delta_high,
            "anchor": "sampler",
            **clamp,
        },
        "importance_sampling": {"kind": "importance_sampling"},
    }
    return surrogates[settings.policy_loss_type]


def _rollout_is(settings: AlgorithmSettings) -> dict[str, Any]:
    """Return the weight policy / sampler, 0 outside the clip."""
    return {
        "ratio": "token",
        "ratio_low": 1 - settings.eps_clip_low,
        "ratio_high": 1 + settings.eps_clip_high,
        "outside": "zero",
        "log_clamp": LOG_CLAMP,
    }


def _correction(c: CorrectionSettings) -> dict[str, Any]:
    gates: list[dict[str, Any]] = []
    if c.outlier_token_is_threshold_high is not None:
        gates.append({"level": "document_max", "high": c.outlier_token_is_threshold_high})
    if c.outlier_token_is_threshold_low is not None:
        gates.append({"level": "document_min", "low": c.outlier_token_is_threshold_low})
    if c.masks_tokens:
        gates.append({"level": "token", "low": c.token_mask_is_threshold_low, "high": c.token_mask_is_threshold_high})
    if c.sequence_mask_metric == "geometric":
        gates.append({"level": "document_mean", "low": c.geo_mask_low, "high": c.geo_mask_high})
    if c.sequence_mask_metric == "product":
        gates.append({"level": "document_sum", "low": c.product_mask_low, "high": c.product_mask_high})
    weights = {
        "token": {"ratio": "token", "ratio_high": c.token_tis_ratio_clip_high},
        "sequence": {"ratio": "document_sum", "ratio_high": c.sequence_tis_ratio_clip_high},
    }
    fields: dict[str, Any] = {} if c.tis_ratio_type is None else dict(weights[c.tis_ratio_type])
    if gates:
        first, *further = gates
        fields |= {"gate": "ratio", "further_gates": [{"statistic": "ratio", **gate} for gate in further]}
        fields |= {f"gate_{name}": value for name, value in first.items()}
    return fields | {"log_clamp": LOG_CLAMP} if fields else {}


def _notes(settings: AlgorithmSettings, spec: LossSpec) -> list[str]:
    notes = ["log ratios are clamped to +-20, and taken to float32 before the exponential"]
    if settings.policy_loss_type == "importance_sampling":
        notes = []
    if spec.kl.coefficient and spec.kl.placement == "loss":
        notes.append("the KL penalty is a mean over rows of each row's mean, whatever divides the policy term")
    if settings.use_entropy_loss:
        notes.append("the entropy bonus is a mean over the micro-batch's tokens, whatever divides the policy term")
    if settings.loss_reduction in ("sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"):
        notes.append("rows and prompts without trained tokens count")
    if settings.loss_reduction == "token_mean_legacy":
        notes.append("every micro-batch is divided by its own count: the step is a mean of means")
    if settings.policy_loss_type == "gspo":
        notes.append(f"the gradient ends where the log of the ratio is above {GSPO_CAP:g}")
    if settings.policy_loss_type == "dppo":
        notes.append("without log-probabilities of the sampler, the old policy takes its place")
    if spec.correction.rejects and settings.policy_loss_type != "rollout_is":
        notes.append("dropped tokens stay in the count, and keep their penalties")
    if settings.ignored:
        notes.append(f"without effect on the loss: {', '.join(settings.ignored)}")
    return notes


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of `trainer.algorithm` for a spec."""
    surrogate = spec.surrogate
    kinds = {
        "ppo": "dual_clip" if surrogate.get("dual_clip") else "regular",
        "gspo_token": "gspo",
        "cispo": "cispo",
        "sapo": "sapo",
        "reinforce": "rollout_is",
        "dppo_tv": "dppo",
        "dppo_kl": "dppo",
        "importance_sampling": "importance_sampling",
    }
    if surrogate.kind not in kinds:
        raise unsupported(
            TITLE, f"the surrogate {surrogate.kind!r}", f"its policy losses are {', '.join(kinds.values())}"
        )
    reductions = {name: reduction for reduction, name in reversed(DENOMINATORS.items())}
    if spec.denominator not in reductions:
        raise unsupported(
            TITLE, f"the denominator {spec.denominator!r}", f"its loss_reductions are {', '.join(DENOMINATORS)}"
        )
    reduction = reductions[spec.denominator]
    if reduction == "token_mean" and spec.compat.scaling.counts == "micro_batch":
        reduction = "token_mean_legacy"
    kind = kinds[surrogate.kind]
    settings: dict[str, Any] = {"policy_loss_type": kind, "loss_reduction": reduction, "use_kl_loss": False}
    if spec.denominator_constant is not None:
        settings["max_seq_len"] = spec.denominator_constant
    settings |= _clip_back(spec, kind)
    if spec.kl.coefficient:
        in_loss = spec.kl.placement == "loss"
        settings |= {"use_kl_loss": in_loss, "use_kl_in_reward": not in_loss}
        settings |= {"kl_loss_coef": spec.kl.coefficient, "kl_estimator_type": spec.kl.estimator}
    if spec.entropy_coefficient:
        settings |= {"use_entropy_loss": True, "entropy_loss_coef": spec.entropy_coefficient}
    if kind != "rollout_is" and spec.correction.acts:
        settings["off_policy_correction"] = _correction_back(spec.correction)
    return checked_back(TITLE, spec, AlgorithmSettings, translate, settings)


def _clip_back(spec: LossSpec, kind: str) -> dict[str, Any]:
    surrogate = spec.surrogate
    if kind == "cispo":
        own = {"cispo_eps_clip_low": surrogate.get("clip_low"), "cispo_eps_clip_high": surrogate.get("clip_high")}
        return {"cispo": {name: value for name, value in own.items() if value is not None}}
    if kind == "sapo":
        return {"sapo": {"tau_pos": surrogate.get("tau_positive"), "tau_neg": surrogate.get("tau_negative")}}
    if kind == "dppo":
        own = {"delta_low": surrogate.get("threshold_low"), "delta_high": surrogate.get("threshold_high")}
        return {"dppo": {"dppo_type": surrogate.kind.replace("dppo", "binary"), **own}}
    if kind == "rollout_is":
        low, high = spec.correction.ratio_low, spec.correction.ratio_high
        if low is None or high is None:
            raise unsupported(TITLE, "reinforce without both bounds of a weight", "rollout_is has two")
        return {"eps_clip_low": 1 - low, "eps_clip_high": high - 1}
    clip = {"eps_clip_low": surrogate.get("clip_low"), "eps_clip_high": surrogate.get("clip_high")}
    if kind == "dual_clip":
        clip["clip_ratio_c"] = surrogate.get("dual_clip")
    return {name: value for name, value in clip.items() if value is not None}


def _correction_back(correction: CorrectionSpec) -> dict[str, Any]:
    """Return the options of the correction that is closest to a spec's."""
    settings: dict[str, Any] = {}
    of_ratios = {
        "token": ("token", "token_tis_ratio_clip_high"),
        "document_sum": ("sequence", "sequence_tis_ratio_clip_high"),
    }
    if correction.ratio in of_ratios:
        kind, bound = of_ratios[correction.ratio]
        settings["tis_ratio_type"] = kind
        if correction.ratio_high is not None:
            settings[bound] = correction.ratio_high
    bounds = {
        "document_max": ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
        "document_min": ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
        "token": ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
        "document_mean": ("geo_mask_low", "geo_mask_high"),
        "document_sum": ("product_mask_low", "product_mask_high"),
    }
    metrics = {"document_mean": "geometric", "document_sum": "product"}
    for gate in correction.gates:
        given = zip(bounds[gate.level], (gate.low, gate.high), strict=True)
        settings |= {name: value for name, value in given if value is not None}
        if gate.level in metrics:
            settings["sequence_mask_metric"] = metrics[gate.level]
    return settings
