"""From options of huggingface/trl to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import CorrectionSpec, LossSpec, ScalingSpec
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back, unsupported
from workbench.systems.trl.settings import COUNTED, TRLSettings

CONTRACTS: Mapping[str, ScalingSpec] = {
    # num_items_in_batch is counted over the generation batch and divided by the number of processes. Exact if a
    # generation batch is one optimizer step. TRL refuses context parallelism.
    "dapo, cispo, vespo": ScalingSpec(multiplied_by=("dp",), engine_divides=("dp",)),
    "grpo, bnpo, dr_grpo, sapo, luspo": ScalingSpec(
        counts="micro_batch", divided_by=("micro_batches",), engine_divides=("dp",)
    ),
}


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types whose term is PPO's; they differ in its denominator."""


DENOMINATORS: Mapping[str, str] = {
    "grpo": "document",
    "sapo": "document",
    "bnpo": "token",
    "dr_grpo": "constant",
    "luspo": "document_sum",
    "dapo": "token",
    "cispo": "token",
    "vespo": "token",
}
"""Loss type -> denominator of its token sums, in the scope of its scaling contract."""


def documents_counted(loss_type: str) -> str:
    """Return the rows that a mean over rows counts: all, also those without trained tokens."""
    return "trained" if DENOMINATORS[loss_type] == "token" else "all"


LEAST_LAMBDA = 1e-4
"""vespo: the smallest lambda."""


VESPO = {"k_positive": "k_pos", "lambda_positive": "lambda_pos", "k_negative": "k_neg", "lambda_negative": "lambda_neg"}
"""vespo: setting of the surrogate -> option, which is also one of its own with the prefix vespo_."""


def translate(settings: TRLSettings) -> Translation:
    """Translate the loss of `_compute_loss`."""
    if settings.use_adaptive_entropy:
        raise SpecError(
            "TRL: use_adaptive_entropy",
            rule="a spec is the loss of one step, and the controller changes "
            "the coefficient from step to step by the entropy that it measured",
            fix="give entropy_coef as it is in that step, and leave the controller out",
        )
    kind = settings.loss_type
    low = settings.epsilon if settings.epsilon_low is None else settings.epsilon_low
    spec = LossSpec(
        name="grpo",
        **fields_of(settings, low, low if settings.epsilon_high is None else settings.epsilon_high, settings.beta),
        correction=_correction(settings),
        entropy_coefficient=settings.entropy_coef,
        top_entropy_share=settings.top_entropy_quantile,
        compat={
            "documents_counted": documents_counted(kind),
            "entropy_denominator": "local_token" if settings.entropy_coef else "penalty",
            "scaling": CONTRACTS[_contract(kind)],
        },
    )
    return Translation(spec, tuple(_notes(settings, spec)), ("vllm_is", "num_items_in_batch"))


def _contract(loss_type: str) -> str:
    return next(name for name in CONTRACTS if loss_type in name.split(", "))


def fields_of(settings: Any, low: float, high: float, beta: float) -> dict[str, Any]:
    """Return surrogate, KL penalty and denominator of TRL or Liger as fields of a spec.

    The clip has the lengths ``low`` below and ``high`` above 1; for cispo ``high`` is the bound itself.
    """
    level = "document" if settings.importance_sampling_level == "sequence" else "token"
    fields: dict[str, Any] = {"surrogate": _surrogate(settings, low, high, level), "kl": {}}
    if beta:
        fields["kl"] = {"coefficient": beta}
        if settings.use_bias_correction_kl:
            fields["kl"] |= {"importance": "old", "gradient": "score", "importance_level": level}
    fields["denominator"] = DENOMINATORS[settings.loss_type]
    if settings.loss_type == "dr_grpo":
        fields["denominator_constant"] = settings.max_completion_length
    return fields


def _surrogate(settings: Any, low: float, high: float, level: str) -> dict[str, Any]:
    if settings.loss_type in CLIPPED:
        kind = "gspo" if level == "document" else "ppo"
        return {"kind": kind, "clip_low": low, "clip_high": high, "delta": settings.delta}
    if settings.loss_type == "cispo":
        return {"kind": "cispo", "bounds": "absolute", "clip_high": high, "level": level}
    if settings.loss_type == "sapo":
        positive, negative = settings.sapo_temperature_pos, settings.sapo_temperature_neg
        return {"kind": "sapo", "level": level, "tau_positive": positive, "tau_negative": negative}
    given = settings.vespo or {}
    values = {name: given.get(option, getattr(settings, f"vespo_{option}")) for name, option in VESPO.items()}
    least = {name: max(value, LEAST_LAMBDA) for name, value in values.items() if name.startswith("lambda")}
    return {"kind": "vespo", **values, **least}


def _correction(settings: TRLSettings) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if settings.vllm_is is not None:
        fields = {"ratio": "given" if settings.vllm_is.startswith("token") else "given_document_mean"}
    elif settings.use_vllm and settings.vllm_importance_sampling_correction:
        cap = settings.vllm_importance_sampling_cap
        fields = bounded_ratio(
            settings.vllm_importance_sampling_mode,
            settings.vllm_importance_sampling_clip_min,
            settings.vllm_importance_sampling_clip_max if cap is None else cap,
        )
    if fields and settings.loss_type == "vespo":
        fields["enters"] = "sequence_weight"
    if settings.off_policy_mask_threshold is not None:
        fields |= {
            "opsm_threshold": settings.off_policy_mask_threshold,
            "unscored": "neutral",
            "opsm_anchor": "sampler" if settings.use_vllm else "old",
        }
    return fields


def bounded_ratio(mode: str, low: float | None, high: float | None) -> dict[str, Any]:
    """Return the correction by old / sampler, of a token or, as a product, of a row."""
    zeroed = mode.endswith("mask") and not (low is None and high is None)
    return {
        "ratio": "token" if mode.startswith("token") else "document_sum",
        "ratio_low": low,
        "ratio_high": high,
        "outside": "zero" if zeroed else "truncate",
        "unscored": "neutral",
    }


def _notes(settings: TRLSettings, spec: LossSpec) -> list[str]:
    notes = []
    if settings.loss_type == "cispo":
        notes.append(
            f"cispo bounds the ratio by epsilon_high itself, {spec.surrogate.get('clip_high'):g}, and not from below"
        )
    if settings.loss_type not in (*CLIPPED, "cispo"):
        notes.append(f"epsilon, epsilon_high and delta have no effect on {settings.loss_type}")
    if settings.loss_type == "vespo" and settings.importance_sampling_level == "sequence":
        notes.append("vespo's weight is always one of the row; importance_sampling_level acts on the KL term only")
    if settings.loss_type == "luspo":
        notes.append("luspo sums over the row's tokens, so the KL penalty grows with the length, too")
    if spec.compat.documents_counted == "all":
        notes.append("rows without trained tokens count in the mean over rows")
    of_step = "num_items_in_batch is of the generation batch, times gradient_accumulation_steps / steps_per_generation"
    of_micro_batch = "every micro-batch is divided by its own count: the step is a mean of means"
    notes.append(of_step if settings.loss_type in COUNTED else of_micro_batch)
    if settings.beta and spec.correction.rejects:
        notes.append("tokens that the correction drops still get the KL penalty")
    if settings.entropy_coef:
        notes.append("the entropy bonus is a mean over the micro-batch's tokens, whatever divides the policy term")
    corrected = settings.use_vllm and settings.vllm_importance_sampling_correction
    if corrected and settings.vllm_is is None and settings.vllm_importance_sampling_mode.startswith("sequence"):
        notes.append("the weight of a row is the product of its tokens' ratios, not their geometric mean")
    if settings.top_entropy_quantile < 1:
        notes.append("the entropy threshold is taken over the micro-batches of all processes together, here over one")
    if "router_aux_loss_coef" in settings.model_fields_set and settings.router_aux_loss_coef != 0:
        notes.append(
            "router_aux_loss_coef: on a mixture of experts the load-balancing loss of the model is added, which is no "
            "function of log-probabilities and no part of this loss"
        )
    if settings.cast_lm_head_to_fp32:
        notes.append("cast_lm_head_to_fp32: log-probabilities are those of a float32 head")
    if settings.use_liger_kernel:
        notes.append("use_liger_kernel: the loss is that of Liger's kernel, the system 'liger'")
    if truncation := [name for name in ("top_k", "top_p", "min_p") if name in settings.ignored]:
        notes.append(
            f"{', '.join(truncation)}: sampler log-probabilities are within the truncated support "
            "(processed_logprobs), those of the policy over the vocabulary; where it truncates, their ratio is "
            "too small by the probability of the support"
        )
    if settings.ignored:
        notes.append(f"without effect on the loss: {', '.join(settings.ignored)}")
    if settings.mask_truncated_completions:
        notes.append("truncated completions must come with a mask of zeros; their rows still count as rows")
    aligned = settings.gradient_accumulation_steps % (_steps_per_generation(settings) * settings.num_iterations) == 0
    if aligned and not corrected:
        notes.append(
            "gradient_accumulation_steps is a multiple of steps_per_generation * num_iterations, so that no "
            "old log-probabilities are kept: the ratio is 1 unless a batch has its own"
        )
    return notes


def counts(settings: TRLSettings) -> GivenCounts:
    """Return the counts of a micro-batch; the count of the generation batch is scaled to one optimizer step."""
    accumulated, items = settings.gradient_accumulation_steps, settings.num_items_in_batch
    tokens = None
    if settings.loss_type in COUNTED and items is not None:
        tokens = max(items, 1.0) * accumulated / _steps_per_generation(settings)
    return GivenCounts(tokens=tokens, micro_batches=accumulated)


def _steps_per_generation(settings: TRLSettings) -> int:
    return settings.steps_per_generation or settings.gradient_accumulation_steps


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of `GRPOConfig` for a spec."""
    surrogate, kl = spec.surrogate, spec.kl
    of_rows = surrogate.kind == "gspo" or surrogate.get("level") == "document" or kl.importance_level == "document"
    settings: dict[str, Any] = {
        "loss_type": _loss_type(spec),
        **options_of(spec, "epsilon"),
        "entropy_coef": spec.entropy_coefficient,
        "top_entropy_quantile": spec.top_entropy_share,
        "importance_sampling_level": "sequence" if of_rows else "token",
    }
    if kl.coefficient:
        settings["use_bias_correction_kl"] = kl.importance != "none"
    settings |= _correction_back(spec.correction)
    return checked_back("TRL", spec, TRLSettings, translate, settings)


def options_of(spec: LossSpec, low: str) -> dict[str, Any]:
    """Return the options of a spec's surrogate, penalty and constant; ``low``: name of the clip's length below 1."""
    surrogate = spec.surrogate
    names = {
        "cispo": {"epsilon_high": "clip_high"},
        "sapo": {"sapo_temperature_pos": "tau_positive", "sapo_temperature_neg": "tau_negative"},
        "vespo": {f"vespo_{option}": name for name, option in VESPO.items()},
    }.get(surrogate.kind, {low: "clip_low", "epsilon_high": "clip_high", "delta": "delta"})
    options = {"beta": spec.kl.coefficient} | {option: surrogate.get(name) for option, name in names.items()}
    if spec.denominator == "constant" and spec.denominator_constant is not None:
        options["max_completion_length"] = int(spec.denominator_constant)
    return options


def _loss_type(spec: LossSpec) -> str:
    kind = spec.surrogate.kind
    if kind in ("sapo", "cispo", "vespo"):
        return kind
    if kind not in ("ppo", "gspo"):
        raise unsupported(
            "TRL", f"the surrogate {kind!r}", "its loss types are PPO's clip on tokens or rows, sapo, cispo and vespo"
        )
    if spec.denominator == "token":
        return "bnpo" if spec.compat.scaling.counts == "micro_batch" else "dapo"
    types = {"document": "grpo", "constant": "dr_grpo", "document_sum": "luspo", "local_token": "bnpo"}
    if spec.denominator not in types:
        raise unsupported("TRL", f"the denominator {spec.denominator!r}", f"it has {', '.join(types)} and token")
    return types[spec.denominator]


def _correction_back(correction: CorrectionSpec) -> dict[str, Any]:
    ratio, settings = correction.ratio, {}
    if correction.opsm_threshold is not None:
        settings = {
            "off_policy_mask_threshold": correction.opsm_threshold,
            "vllm_importance_sampling_correction": False,
            "use_vllm": correction.opsm_anchor == "sampler",
        }
    if ratio in ("given", "given_document_mean"):
        return settings | {"vllm_is": "token" if ratio == "given" else "sequence"}
    if ratio == "none":
        return settings
    if ratio not in ("token", "document_sum"):
        raise unsupported(
            "TRL", f"a correction by the ratio {ratio!r}", "it weights by token ratios or their product over the row"
        )
    level, ending = "token" if ratio == "token" else "sequence", "mask" if correction.outside == "zero" else "truncate"
    return settings | {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": f"{level}_{ending}",
        "vllm_importance_sampling_clip_min": correction.ratio_low,
        "vllm_importance_sampling_clip_max": correction.ratio_high,
    }
