"""From options of verl-project/verl to a spec, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import SpecError
from workbench.reduction.denominators import GivenCounts
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.systems.registry import Translation
from workbench.systems.translate import checked_back, unsupported
from workbench.systems.verl.correction import (
    EPSILON,
    SAFETY,
    TITLE,
    correction_back,
    gates_of,
    live_weights_of,
    weights_of,
)
from workbench.systems.verl.settings import BY_DOCUMENT, ActorSettings, GlobalBatchInfo

CONTRACTS: Mapping[str, ScalingSpec] = {
    # Ulysses: the gather of log-probabilities adds over its ranks on the way back.
    "fsdp": ScalingSpec(multiplied_by=("dp",), replicated=True, engine_divides=("dp_cp",)),
    "megatron": ScalingSpec(
        multiplied_by=("dp", "micro_batches"), engine_multiplies=("cp",), engine_divides=("micro_batches", "dp_cp")
    ),
    # Without global_batch_info a micro-batch counts for itself, and the actor divides by accumulation steps.
    "local counts": ScalingSpec(
        counts="micro_batch", divided_by=("micro_batches",), replicated=True, engine_divides=("dp_cp",)
    ),
}


GSPO_CAP = 10.0
"""Upper bound of the log of gspo's ratio."""


DENOMINATORS = {
    "token-mean": "token",
    "token-sum": "raw",
    "seq-mean-token-sum": "document_sum",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-mean": "document",
}
"""loss_agg_mode -> `LossSpec.denominator`."""


ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""kl_penalty -> `KLSpec.estimator`."""


def translate(settings: ActorSettings) -> Translation:
    """Translate the actor's loss, by its name in the registry."""
    mode = settings.policy_loss.loss_mode
    outer = settings.rollout_correction
    if outer is not None and outer.bypass_mode:
        mode = "bypass_mode"
    _check(settings, mode)
    notes: list[str] = []
    fields = _aggregated(settings, mode, notes)
    fields["surrogate"] = _surrogate(settings, mode, notes)
    fields["correction"] = _correction_of(settings, mode, notes)
    if mode == "bypass_mode" and fields["correction"]:
        fields["old_policy"] = "current"
    if settings.use_kl_loss:
        fields["kl"] = {"coefficient": settings.kl_loss_coef, **kl(settings.kl_loss_type)}
    if settings.entropy_coeff:
        fields["entropy_coefficient"] = settings.entropy_coeff
    return Translation(LossSpec(name="ppo", **fields), tuple(notes), ("global_batch_info", "rollout_is_weights"))


def _check(settings: ActorSettings, mode: str) -> None:
    info = settings.global_batch_info
    by_tokens = settings.loss_agg_mode == "token-mean" and mode not in BY_DOCUMENT
    needed = "batch_num_tokens" if by_tokens else "global_batch_size"
    counted = mode != "geo_mean" and (mode in BY_DOCUMENT or settings.loss_agg_mode != "token-sum")
    if info.dp_size > 1 and counted and getattr(info, needed) is None:
        raise SpecError(
            f"verl with dp_size = {info.dp_size}",
            found=f"no {needed}",
            rule="a rank of several cannot count the whole mini-batch",
            fix=f"set {needed}",
        )
    penalised = settings.use_kl_loss or bool(settings.entropy_coeff)
    if penalised and mode == "geo_mean":
        raise SpecError(
            "verl's geo_mean with use_kl_loss or entropy_coeff",
            rule="geo_mean is a mean over all rows of a micro-batch and the penalties are averaged by "
            "loss_agg_mode: one spec has one denominator",
            fix="leave the penalties out",
        )
    if penalised and mode in BY_DOCUMENT and settings.loss_agg_mode != "seq-mean-token-mean":
        raise SpecError(
            f"verl's {mode} with use_kl_loss or entropy_coeff and loss_agg_mode {settings.loss_agg_mode!r}",
            rule=f"{mode} is averaged by seq-mean-token-mean and the penalties by loss_agg_mode: one spec "
            "has one denominator",
            fix='set loss_agg_mode to "seq-mean-token-mean"',
        )
    outer = settings.rollout_correction
    if penalised and outer is not None and not outer.bypass_mode and outer.rollout_rs is not None:
        raise SpecError(
            "verl's rollout_rs with use_kl_loss or entropy_coeff",
            rule="verl takes rejected tokens out of the penalties, too; here they keep theirs",
            fix="leave the penalties or the rejection out",
        )


def _aggregated(settings: ActorSettings, mode: str, notes: list[str]) -> dict[str, Any]:
    if mode == "geo_mean":
        notes.append(
            "loss_agg_mode and global_batch_info are ignored by geo_mean: every micro-batch is a mean over "
            "its rows, including empty ones, and micro-batches are summed"
        )
        local = CONTRACTS["local counts"].model_copy(
            update={"divided_by": (), "length_epsilon": EPSILON, "mean_epsilon": EPSILON}
        )
        return {"denominator": "document", "compat": {"documents_counted": "all", "scaling": local}}
    agg = settings.loss_agg_mode
    if mode in BY_DOCUMENT and agg != "seq-mean-token-mean":
        notes.append(f"loss_agg_mode is ignored by {mode}, which is averaged by seq-mean-token-mean")
        agg = "seq-mean-token-mean"
    scale = settings.global_batch_info.loss_scale_factor or settings.loss_scale_factor
    epsilon = EPSILON if agg == "seq-mean-token-mean" else 0.0
    scaling = CONTRACTS["fsdp"].model_copy(update={"length_epsilon": epsilon})
    return denominator(agg, scale) | {"compat": {"scaling": scaling}}


def denominator(agg: str, scale: float | None) -> dict[str, Any]:
    """Return the settings of the denominator of a ``loss_agg_mode``."""
    if agg == "seq-mean-token-sum-norm" and scale is None:
        raise SpecError(
            "verl's seq-mean-token-sum-norm without loss_scale_factor",
            rule="verl divides by the padded width of each micro-batch, which is no setting",
            fix="set loss_scale_factor",
        )
    constant = {"denominator_constant": scale} if agg == "seq-mean-token-sum-norm" else {}
    return {"denominator": DENOMINATORS[agg], **constant}


def _surrogate(settings: ActorSettings, mode: str, notes: list[str]) -> dict[str, Any]:
    low = settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low
    high = settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high
    clip, own = {"clip_low": low, "clip_high": high}, settings.policy_loss
    bypass = own.rollout_correction or settings.rollout_correction
    if mode == "vanilla" or (mode == "bypass_mode" and bypass is not None and bypass.loss_type == "ppo_clip"):
        if settings.clip_ratio_c <= 1:
            raise SpecError(
                f"verl's clip_ratio_c = {settings.clip_ratio_c}",
                rule="the dual clip is greater than 1",
                fix="correct the option",
            )
        notes.append(f"dual clip {settings.clip_ratio_c:g} is always on")
        notes.append(f"|log ratio| is clamped to {SAFETY:g}, without gradient beyond")
        anchor = "old" if mode == "vanilla" else "sampler"
        return {"kind": "ppo", **clip, "dual_clip": settings.clip_ratio_c, "log_clamp": SAFETY, "anchor": anchor}
    if mode == "dro" and (own.dro_beta is None or own.dro_beta <= 0):
        raise SpecError(
            f"verl's dro with dro_beta = {own.dro_beta}",
            rule="dro_beta is positive, and has no default",
            fix="set policy_loss.dro_beta",
        )
    if mode in ("dppo_tv", "dppo_kl"):
        notes.append(f"the ratio in the gradient is capped at clip_ratio_c = {settings.clip_ratio_c:g}")
        thresholds = {"threshold_low": low, "threshold_high": high, "ratio_cap": settings.clip_ratio_c}
        return {"kind": mode, "anchor": "old", **thresholds, "log_clamp": SAFETY}
    if mode == "gspo":
        notes.append(f"the gradient ends where the log of the ratio is above {GSPO_CAP:g}")
    if mode == "clip_cov":
        notes.append(
            "of the tokens in the band of covariances verl draws at random; here a hash of their positions "
            "selects. Without clip_cov_ratio 1 the two select different tokens"
        )
    taus = {"tau_positive": settings.tau_pos, "tau_negative": settings.tau_neg}
    band = {"cov_low": _or(own.clip_cov_lb, 1.0), "cov_high": _or(own.clip_cov_ub, 5.0)}
    penalty = {"cov_fraction": _or(own.kl_cov_ratio, 0.0002), "cov_coefficient": _or(own.ppo_kl_coef, 1.0)}
    surrogates: dict[str, dict[str, Any]] = {
        "bypass_mode": {"kind": "reinforce"},
        "reinforce": {"kind": "reinforce"},
        "gspo": {"kind": "gspo_token", **clip, "log_cap": GSPO_CAP},
        "sapo": {"kind": "sapo", **taus, "log_clamp": SAFETY},
        "gpg": {"kind": "gpg"},
        "cispo": {"kind": "cispo", "bounds": "relative", **clip, "log_clamp": SAFETY},
        "geo_mean": {"kind": "gmpo", **clip},
        "dro": {"kind": "dro", "beta": own.dro_beta},
        "clip_cov": {"kind": "clip_cov", **clip, "cov_fraction": _or(own.clip_cov_ratio, 0.0002), **band},
        "kl_cov": {"kind": "kl_cov", **penalty},
    }
    return surrogates[mode]


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def kl(name: str) -> dict[str, Any]:
    """Return the settings of the KL penalty of a ``kl_loss_type``."""
    base = name.removesuffix("+")
    if base not in ESTIMATORS:
        raise SpecError(
            f"verl's KL penalty {name!r}",
            rule=f"one of {', '.join(ESTIMATORS)}, each also with a "
            'trailing "+"; "full" needs whole distributions and is not implemented in verl either',
            fix="choose one of them",
        )
    clamps = {"input_clamp": SAFETY, "output_clamp": 10.0} if ESTIMATORS[base] == "k3" else {}
    gradient = "path" if name == base else "straight_through"
    return {"estimator": ESTIMATORS[base], "gradient": gradient, **clamps}


def _correction_of(settings: ActorSettings, mode: str, notes: list[str]) -> dict[str, Any]:
    if settings.rollout_is_weights and mode != "bypass_mode":
        if mode == "geo_mean":
            return {"ratio": "given_document_mean", "given_epsilon": 1e-10}
        return {"kind": "none", "ratio": "given"}
    outer = settings.rollout_correction
    if mode != "bypass_mode":
        return {} if outer is None else weights_of(outer) | gates_of(outer)
    chosen = settings.policy_loss.rollout_correction or outer
    if chosen is None:
        raise SpecError(
            "verl's bypass_mode",
            found="no rollout_correction",
            rule="the loss computes its correction by policy_loss.rollout_correction",
            fix="set it; {} is enough",
        )
    notes.append("the correction compares the live policy with the rollout policy, inside the loss")
    if chosen.loss_type == "ppo_clip":
        return gates_of(chosen)
    return live_weights_of(chosen) | gates_of(chosen)


def back(spec: LossSpec) -> dict[str, Any]:
    """Return the options of the actor for a spec."""
    surrogate = spec.surrogate
    modes = {
        "ppo": "vanilla",
        "gspo_token": "gspo",
        "sapo": "sapo",
        "gpg": "gpg",
        "cispo": "cispo",
        "gmpo": "geo_mean",
        "dro": "dro",
        "clip_cov": "clip_cov",
        "kl_cov": "kl_cov",
        "dppo_tv": "dppo_tv",
        "dppo_kl": "dppo_kl",
    }
    bypass = surrogate.kind == "reinforce" or (surrogate.kind == "ppo" and surrogate.get("anchor") == "sampler")
    if surrogate.kind not in modes and not bypass:
        raise unsupported(
            TITLE, f"the surrogate {surrogate.kind!r}", f"its policy losses are {', '.join(modes.values())}"
        )
    mode = "bypass_mode" if bypass else modes[surrogate.kind]
    by_name = {name: agg for agg, name in DENOMINATORS.items()}
    if spec.denominator not in by_name:
        raise unsupported(
            TITLE, f"the denominator {spec.denominator!r}", f"its loss_agg_modes are {', '.join(DENOMINATORS)}"
        )
    own: dict[str, Any] = {"loss_mode": mode}
    settings: dict[str, Any] = {
        "loss_agg_mode": "token-mean" if mode == "geo_mean" else by_name[spec.denominator],
        "policy_loss": own,
    }
    if spec.denominator_constant is not None:
        settings["loss_scale_factor"] = spec.denominator_constant
    for option, *names in (
        ("clip_ratio_low", "clip_low", "threshold_low"),
        ("clip_ratio_high", "clip_high", "threshold_high"),
        ("clip_ratio_c", "dual_clip", "ratio_cap"),
        ("tau_pos", "tau_positive"),
        ("tau_neg", "tau_negative"),
    ):
        values = [value for name in names if (value := surrogate.get(name)) is not None]
        if values:
            settings[option] = values[0]
    own_names = {
        "dro": {"dro_beta": "beta"},
        "clip_cov": {"clip_cov_ratio": "cov_fraction", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"},
        "kl_cov": {"kl_cov_ratio": "cov_fraction", "ppo_kl_coef": "cov_coefficient"},
    }.get(mode, {})
    own |= {option: surrogate.get(name) for option, name in own_names.items()}
    if spec.kl.coefficient:
        types = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"}
        if spec.kl.estimator not in types:
            raise unsupported(TITLE, f"the KL estimator {spec.kl.estimator!r}", f"it has {', '.join(types)}")
        plus = "+" if spec.kl.gradient == "straight_through" else ""
        settings |= {
            "use_kl_loss": True,
            "kl_loss_coef": spec.kl.coefficient,
            "kl_loss_type": types[spec.kl.estimator] + plus,
        }
    if spec.entropy_coefficient:
        settings["entropy_coeff"] = spec.entropy_coefficient
    if bypass:
        loss_type = "reinforce" if surrogate.kind == "reinforce" else "ppo_clip"
        own["rollout_correction"] = {"loss_type": loss_type, **correction_back(spec.correction)}
    elif spec.correction.ratio in ("given", "given_document_mean"):
        settings["rollout_is_weights"] = True
    elif spec.correction.acts:
        settings["rollout_correction"] = correction_back(spec.correction)
    return checked_back(TITLE, spec, ActorSettings, translate, settings)


def counts(settings: ActorSettings) -> GivenCounts | None:
    """Return the counts that `agg_loss` was given; geo_mean ignores them."""
    if settings.policy_loss.loss_mode == "geo_mean":
        return None
    return given(settings.global_batch_info)


def given(info: GlobalBatchInfo) -> GivenCounts:
    """Return the counts that a call was given."""
    return GivenCounts(tokens=info.batch_num_tokens, documents=info.global_batch_size, dp=info.dp_size)
