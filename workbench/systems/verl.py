"""verl-project/verl: the actor's policy losses, its critic, advantage estimators and rollout correction.

Names and defaults are those of `ActorConfig`, `PolicyLossConfig`, `RolloutCorrectionConfig` and of the functions in
``trainer/ppo/core_algos.py`` and ``rollout_corr_helper.py``.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.corrections import apply_correction
from workbench.losses.value import value_loss
from workbench.metrics.values import Mean
from workbench.reduction.denominators import GivenCounts
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import TokenWeights, step_weights
from workbench.specs.losses import CorrectionSpec, LossSpec
from workbench.systems import metrics as aliases
from workbench.systems.back import checked_back, refuse
from workbench.systems.case import Case
from workbench.systems.contracts import CONTRACTS
from workbench.systems.empty_batch import undefined
from workbench.systems.metrics.alias import PeerSettings, settings_of
from workbench.systems.registry import Settings, System, Translation, parse_settings
from workbench.systems.replays import Replayed, aggregation, is_correction, kl_estimator, policy_loss
from workbench.systems.verl_advantages import advantages
from workbench.systems.verl_correction import (
    EPSILON,
    SAFETY,
    TITLE,
    RolloutCorrection,
    correction_back,
    correction_outputs,
    gates_of,
    translate_correction,
    weights_of,
)

GSPO_CAP = 10.0
"""Greatest log of gspo's ratio."""

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
LossMode = Literal[
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "bypass_mode",
    "reinforce",
]

DENOMINATORS = {
    "token-mean": "token",
    "token-sum": "raw",
    "seq-mean-token-sum": "document_sum",
    "seq-mean-token-sum-norm": "constant",
    "seq-mean-token-mean": "document",
}
"""loss_agg_mode -> our denominator."""
BY_DOCUMENT = ("gspo", "sapo")
"""Losses that are averaged by seq-mean-token-mean, whatever loss_agg_mode says."""
ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
"""kl_penalty -> our estimator."""


OF_LOSS = ("actor/pg_clipfrac", "actor/ppo_kl")
"""Names that a policy loss reports."""


class PolicyLoss(Settings):
    """Which policy loss, and what only one of them uses (`PolicyLossConfig`, 1dda039b)."""

    loss_mode: LossMode = "vanilla"
    """Name in the registry; "reinforce" is the function that bypass_mode calls."""
    clip_cov_ratio: float | None = Field(0.0002, gt=0)
    """clip_cov: share of tokens that may be selected."""
    clip_cov_lb: float | None = 1.0
    """clip_cov: lower end of the band of covariances."""
    clip_cov_ub: float | None = 5.0
    """clip_cov: upper end of it."""
    kl_cov_ratio: float | None = Field(0.0002, gt=0)
    """kl_cov: share of tokens that is penalised."""
    ppo_kl_coef: float | None = Field(0.1, ge=0)
    """kl_cov: weight of the penalty; None: 1."""
    dro_beta: float | None = None
    """dro: strength of the pull; must be said."""
    rollout_correction: RolloutCorrection | None = None
    """bypass_mode: computed on the live policy inside the loss."""


class GlobalBatchInfo(Settings):
    """Counts of the whole mini-batch that a micro-batch is handed."""

    dp_size: int = Field(1, ge=1)
    """Data-parallel ranks, whose gradients are averaged."""
    batch_num_tokens: float | None = Field(None, gt=0)
    """Trained tokens on all of them."""
    global_batch_size: float | None = Field(None, gt=0)
    """Sequences on all of them."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """seq-mean-token-sum-norm: what a sequence's sum is divided by."""


class ActorSettings(Settings):
    """The actor's loss (`ActorConfig`, 1dda039b)."""

    clip_ratio: float = Field(0.2, ge=0)
    """Clip length where the two below are None."""
    clip_ratio_low: float | None = Field(0.2, ge=0)
    """Length of the clip below 1; dppo: how far a token may move down; geo_mean: of the log ratio."""
    clip_ratio_high: float | None = Field(0.2, ge=0)
    """Length of the clip above 1; dppo: how far a token may move up; geo_mean: of the log ratio."""
    clip_ratio_c: float = 3.0
    """vanilla: dual clip; dppo: cap of the ratio."""
    tau_pos: float = Field(1.0, gt=0)
    """sapo: steepness where the advantage is positive."""
    tau_neg: float = Field(1.05, gt=0)
    """sapo: steepness elsewhere."""
    loss_agg_mode: AggMode = "token-mean"
    """How per-token losses become one number."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """seq-mean-token-sum-norm: what a sequence's sum is divided by; None: the padded width of the micro-batch."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add a KL penalty against the reference."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Its weight."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3); a trailing "+" keeps the value and takes the gradient of
    k2."""
    policy_loss: PolicyLoss = PolicyLoss()
    """Which loss."""
    rollout_correction: RolloutCorrection | None = None
    """The trainer's (`algorithm.rollout_correction`): computed once on the old policy, before the update."""
    global_batch_info: GlobalBatchInfo = GlobalBatchInfo()
    """Given: counts of the whole mini-batch."""
    rollout_is_weights: bool = False
    """Given: whether importance weights come with the batch."""


class AggregationSettings(GlobalBatchInfo):
    """`agg_loss` (1dda039b)."""

    loss_agg_mode: AggMode = "token-mean"
    """How per-token values become one number."""


class KLSettings(GlobalBatchInfo):
    """`kl_penalty` and `agg_loss` (1dda039b)."""

    kl_penalty: str = "low_var_kl"
    """See `ActorSettings.kl_loss_type`."""
    loss_agg_mode: AggMode = "token-mean"
    """How per-token values become one number."""


class ValueSettings(GlobalBatchInfo):
    """`compute_value_loss` (1dda039b)."""

    cliprange_value: float = Field(0.5, gt=0)
    """How far a value may move from the old one before the error no longer falls."""
    loss_agg_mode: AggMode = "token-mean"
    """How per-token errors become one number."""


# ---- the actor's loss --------------------------------------------------------------------------------------------


def translate(settings: ActorSettings) -> Translation:
    """The actor's loss, by the name in the registry."""
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
        fields["kl"] = {"coefficient": settings.kl_loss_coef, **_kl(settings.kl_loss_type)}
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
            fix=f"say {needed}",
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
    scaling = CONTRACTS["verl"]["fsdp"]
    if mode == "geo_mean":
        notes.append(
            "loss_agg_mode and global_batch_info are ignored by geo_mean: every micro-batch is a mean over "
            "its rows, empty ones too, and micro-batches add up"
        )
        local = CONTRACTS["verl"]["local counts"].model_copy(
            update={"divided_by": (), "length_epsilon": EPSILON, "mean_epsilon": EPSILON}
        )
        return {"denominator": "document", "documents_counted": "all", "scaling": local}
    agg = settings.loss_agg_mode
    if mode in BY_DOCUMENT and agg != "seq-mean-token-mean":
        notes.append(f"loss_agg_mode is ignored by {mode}, which is averaged by seq-mean-token-mean")
        agg = "seq-mean-token-mean"
    scale = settings.global_batch_info.loss_scale_factor or settings.loss_scale_factor
    return _denominator(agg, scale) | {
        "scaling": scaling.model_copy(update={"length_epsilon": EPSILON if agg == "seq-mean-token-mean" else 0.0})
    }


def _denominator(agg: str, scale: float | None) -> dict[str, Any]:
    if agg == "seq-mean-token-sum-norm" and scale is None:
        raise SpecError(
            "verl's seq-mean-token-sum-norm without loss_scale_factor",
            rule="verl divides by the padded width of each micro-batch, which is no setting",
            fix="say loss_scale_factor",
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
        notes.append(f"|log ratio| is held within {SAFETY:g}, without gradient beyond")
        return {
            "kind": "ppo",
            **clip,
            "dual_clip": settings.clip_ratio_c,
            "log_clamp": SAFETY,
            "anchor": "old" if mode == "vanilla" else "sampler",
        }
    if mode in ("bypass_mode", "reinforce"):
        return {"kind": "reinforce"}
    if mode in ("dppo_tv", "dppo_kl"):
        notes.append(f"the ratio in the gradient is capped at clip_ratio_c = {settings.clip_ratio_c:g}")
        return {
            "kind": mode,
            "anchor": "old",
            "threshold_low": low,
            "threshold_high": high,
            "ratio_cap": settings.clip_ratio_c,
            "log_clamp": SAFETY,
        }
    if mode == "gspo":
        notes.append(f"the gradient ends where the log of the ratio is above {GSPO_CAP:g}")
        return {"kind": "gspo_token", **clip, "log_cap": GSPO_CAP}
    if mode == "sapo":
        return {"kind": "sapo", "tau_positive": settings.tau_pos, "tau_negative": settings.tau_neg, "log_clamp": SAFETY}
    if mode == "gpg":
        return {"kind": "gpg"}
    if mode == "cispo":
        return {"kind": "cispo", "bounds": "relative", **clip, "log_clamp": SAFETY}
    if mode == "geo_mean":
        return {"kind": "gmpo", **clip}
    if mode == "dro":
        if own.dro_beta is None or own.dro_beta <= 0:
            raise SpecError(
                f"verl's dro with dro_beta = {own.dro_beta}",
                rule="dro_beta is positive, and has no default",
                fix="say policy_loss.dro_beta",
            )
        return {"kind": "dro", "beta": own.dro_beta}
    if mode == "clip_cov":
        notes.append(
            "of the tokens in the band of covariances verl draws at random; here a hash of their places "
            "chooses. Without clip_cov_ratio 1 the two select different tokens"
        )
        return {
            "kind": "clip_cov",
            **clip,
            "cov_fraction": _or(own.clip_cov_ratio, 0.0002),
            "cov_low": _or(own.clip_cov_lb, 1.0),
            "cov_high": _or(own.clip_cov_ub, 5.0),
        }
    return {
        "kind": "kl_cov",
        "cov_fraction": _or(own.kl_cov_ratio, 0.0002),
        "cov_coefficient": _or(own.ppo_kl_coef, 1.0),
    }


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _kl(name: str) -> dict[str, Any]:
    base = name.removesuffix("+")
    if base not in ESTIMATORS:
        raise SpecError(
            f"verl's KL penalty {name!r}",
            rule=f"one of {', '.join(ESTIMATORS)}, each also with a "
            'trailing "+"; "full" needs whole distributions and is not there in verl either',
            fix="choose one of them",
        )
    clamps = {"input_clamp": SAFETY, "output_clamp": 10.0} if ESTIMATORS[base] == "k3" else {}
    gradient = "path" if name == base else "straight_through"
    return {"estimator": ESTIMATORS[base], "gradient": gradient, **clamps}


# ---- rollout correction ------------------------------------------------------------------------------------------


def _correction_of(settings: ActorSettings, mode: str, notes: list[str]) -> dict[str, Any]:
    if settings.rollout_is_weights and mode not in ("bypass_mode",):
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
            fix="say it, if only {}",
        )
    notes.append("the correction compares the live policy with the rollout policy, inside the loss")
    if chosen.loss_type == "ppo_clip":
        return gates_of(chosen)
    weights = weights_of(chosen)
    return weights | ({"population": "micro_batch"} if "normalize" in weights else {}) | gates_of(chosen)


# ---- back --------------------------------------------------------------------------------------------------------


def back(spec: LossSpec) -> dict[str, Any]:
    """Options of the actor for a spec."""
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
    bypass = surrogate.kind == "reinforce" or (surrogate.kind == "ppo" and surrogate.anchor == "sampler")
    if surrogate.kind not in modes and not bypass:
        raise refuse(TITLE, f"the surrogate {surrogate.kind!r}", f"its policy losses are {', '.join(modes.values())}")
    mode = "bypass_mode" if bypass else modes[surrogate.kind]
    by_name = {name: agg for agg, name in DENOMINATORS.items()}
    if spec.denominator not in by_name:
        raise refuse(
            TITLE, f"the denominator {spec.denominator!r}", f"its loss_agg_modes are {', '.join(DENOMINATORS)}"
        )
    own: dict[str, Any] = {"loss_mode": mode}
    settings: dict[str, Any] = {
        "loss_agg_mode": "token-mean" if mode == "geo_mean" else by_name[spec.denominator],
        "policy_loss": own,
    }
    if spec.denominator_constant is not None:
        settings["loss_scale_factor"] = spec.denominator_constant
    for name, value in (
        ("clip_ratio_low", _first(surrogate.clip_low, surrogate.threshold_low)),
        ("clip_ratio_high", _first(surrogate.clip_high, surrogate.threshold_high)),
        ("clip_ratio_c", _first(surrogate.dual_clip, surrogate.ratio_cap)),
        ("tau_pos", surrogate.tau_positive),
        ("tau_neg", surrogate.tau_negative),
    ):
        if value is not None:
            settings[name] = value
    if mode == "dro":
        own["dro_beta"] = surrogate.beta
    if mode == "clip_cov":
        own |= {
            "clip_cov_ratio": surrogate.cov_fraction,
            "clip_cov_lb": surrogate.cov_low,
            "clip_cov_ub": surrogate.cov_high,
        }
    if mode == "kl_cov":
        own |= {"kl_cov_ratio": surrogate.cov_fraction, "ppo_kl_coef": surrogate.cov_coefficient}
    if spec.kl.coefficient:
        names = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"}
        if spec.kl.estimator not in names:
            raise refuse(TITLE, f"the KL estimator {spec.kl.estimator!r}", f"it has {', '.join(names)}")
        plus = "+" if spec.kl.gradient == "straight_through" else ""
        settings |= {
            "use_kl_loss": True,
            "kl_loss_coef": spec.kl.coefficient,
            "kl_loss_type": names[spec.kl.estimator] + plus,
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


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


# ---- replays -----------------------------------------------------------------------------------------------------


def case_settings(case: Case) -> dict[str, Any]:
    """The loss is said by the function's name; the padded width and ready-made weights by the arrays."""
    config = dict(case.config)
    own = dict(config.get("policy_loss") or {})
    own.setdefault("loss_mode", case.function.split()[0].removeprefix("compute_policy_loss_"))
    if own["loss_mode"] == "bypass_mode" and "rollout_correction" in config:
        own["rollout_correction"] = config.pop("rollout_correction")
    if own["loss_mode"] == "reinforce":
        config.setdefault("loss_agg_mode", "seq-mean-token-sum")
    config["policy_loss"] = own
    info = config.get("global_batch_info") or {}
    if not (config.get("loss_scale_factor") or info.get("loss_scale_factor")):
        config["loss_scale_factor"] = case.shape[-1]
    if case.get("is_weights") is not None:
        config["rollout_is_weights"] = True
    return config


def counts(settings: ActorSettings) -> GivenCounts | None:
    """What `agg_loss` was handed; geo_mean looks at none of it."""
    if settings.policy_loss.loss_mode == "geo_mean":
        return None
    return _given(settings.global_batch_info)


def _given(info: GlobalBatchInfo) -> GivenCounts:
    return GivenCounts(tokens=info.batch_num_tokens, documents=info.global_batch_size, dp=info.dp_size)


def actor_loss(case: Case) -> dict[str, Any]:
    """A policy loss. In bypass mode the old policy of a correction is the live one, whatever else was recorded."""
    live = "bypass" in case.function or "reinforce" in case.function
    inputs = {name: value for name, value in case.inputs.items() if not (live and name == "old_logprobs")}
    if live and "rollout_logprobs" not in inputs and case.get("old_logprobs") is not None:
        inputs["rollout_logprobs"] = case["old_logprobs"]
    return policy_loss(replace(case, inputs=inputs))


def peer_settings(replayed: Replayed) -> PeerSettings:
    """A loss reports itself, and in bypass mode its correction; a correction reports itself.

    In a loss, verl's shares of sequences are means of flags in single precision, whatever the log-probabilities are.
    """
    settings, found = replayed.settings, settings_of(replayed.translation.spec, replayed.slots)
    if not isinstance(settings, ActorSettings):
        return found._replace(only=("rollout_corr/",))
    bypass = settings.policy_loss.loss_mode == "bypass_mode"
    return found._replace(single=True, only=(*OF_LOSS, "rollout_corr/") if bypass else OF_LOSS)


def undefined_loss(replayed: Replayed) -> dict[str, Tensor]:
    """NaN where `agg_loss` divides by 0: nothing counts here, and no count of the mini-batch was handed in.

    The gradient stays 0: what masked_sum leaves out has none, whatever it is divided by.
    """
    settings = replayed.settings
    if not isinstance(settings, ActorSettings) or settings.policy_loss.loss_mode == "geo_mean":
        return {}
    mode = settings.policy_loss.loss_mode
    agg = "seq-mean-token-mean" if mode in BY_DOCUMENT else settings.loss_agg_mode
    return {"loss": undefined()} if _is_undefined(agg, settings.global_batch_info, replayed.weights["policy"]) else {}


def _is_undefined(agg: str, info: GlobalBatchInfo, weights: TokenWeights) -> bool:
    """True if a mean is taken over nothing."""
    given = {"token-mean": info.batch_num_tokens, "token-sum": 1.0}.get(agg, info.global_batch_size)
    return given is None and not weights.loss_T.any()


def bypass_metrics(replayed: Replayed) -> dict[str, float]:
    """bypass_mode reports importance weights even where its loss does not use them."""
    settings = replayed.settings
    if not isinstance(settings, ActorSettings) or settings.policy_loss.loss_mode != "bypass_mode":
        return {}
    chosen = settings.policy_loss.rollout_correction
    weights = {} if chosen is None else weights_of(chosen)
    if not weights or replayed.translation.spec.surrogate.kind != "ppo":
        return {}
    if "normalize" in weights:
        weights["population"] = "micro_batch"
    spec = replayed.translation.spec
    both = spec.model_copy(update={"correction": CorrectionSpec(**(weights | gates_of(chosen)))})
    term = apply_correction(replayed.evaluated.terms["policy"], replayed.inputs, both.correction)
    found = aliases.as_named_by(
        "verl",
        replayed.inputs,
        replayed.row.loss_mask_T,
        terms={"policy": term},
        loss_spec=both,
        slots=replayed.slots,
        settings=settings_of(both, replayed.slots)._replace(single=True),
    )
    return {name: value.finish() for name, value in found.items() if name.startswith("rollout_corr/rollout_is")}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of the mini-batch are arguments of their own, or the mapping that is spread into them."""
    own = dict(config)
    return {**(own.pop("global_batch_info", None) or {}), **own}


def aggregated_spec(case: Case) -> LossSpec:
    """Denominator and scaling of `agg_loss`."""
    settings = parse_settings(AggregationSettings, _flat(case.config), where=TITLE)
    return _spec_of(settings.loss_agg_mode, settings, case)


def _spec_of(agg: str, info: GlobalBatchInfo, case: Case, **more: Any) -> LossSpec:
    if (
        info.dp_size > 1
        and agg != "token-sum"
        and (info.batch_num_tokens if agg == "token-mean" else info.global_batch_size) is None
    ):
        raise SpecError(
            f"verl's agg_loss with dp_size = {info.dp_size}",
            found="no count of the whole mini-batch",
            rule="a rank of several cannot count it",
            fix="say batch_num_tokens and global_batch_size",
        )
    epsilon = EPSILON if agg == "seq-mean-token-mean" else 0.0
    return LossSpec(
        name="ppo",
        **_denominator(agg, info.loss_scale_factor or case.shape[-1]),
        **more,
        scaling=CONTRACTS["verl"]["fsdp"].model_copy(update={"length_epsilon": epsilon}),
    )


def aggregated_counts(case: Case) -> GivenCounts:
    """What `agg_loss` was handed."""
    return _given(parse_settings(AggregationSettings, _flat(case.config), where=TITLE))


def estimated_spec(case: Case) -> LossSpec:
    """The KL penalty alone."""
    settings = parse_settings(KLSettings, _flat(case.config), where=TITLE)
    return _spec_of(settings.loss_agg_mode, settings, case, kl={"coefficient": 1.0, **_kl(settings.kl_penalty)})


def aggregated(case: Case) -> dict[str, Any]:
    """`agg_loss`."""
    return _or_undefined(case, aggregation(aggregated_spec, aggregated_counts)(case), AggregationSettings)


def penalty(case: Case) -> dict[str, Any]:
    """`kl_penalty`, and `agg_loss` of it where no cotangent is given."""
    return _or_undefined(case, kl_estimator(estimated_spec)(case), KLSettings)


def _or_undefined(case: Case, outputs: dict[str, Any], model: type[GlobalBatchInfo]) -> dict[str, Any]:
    """The outputs with NaN in place of a mean over nothing."""
    settings = parse_settings(model, _flat(case.config), where=TITLE)
    (weights,), _ = step_weights([case.row()], LossSpec(name="ppo"))
    empty = _is_undefined(settings.loss_agg_mode, settings, weights["policy"])
    return outputs | {"loss": undefined()} if empty and "loss" in outputs else outputs


def critic_loss(case: Case) -> dict[str, Any]:
    """`compute_value_loss`."""
    settings = parse_settings(ValueSettings, _flat(case.config), where=TITLE)
    leaf = case["values"].clone().requires_grad_()
    term = value_loss(
        leaf.reshape(-1),
        case["returns"].reshape(-1),
        case.loss_mask_T,
        old_values_T=case["old_values"].reshape(-1),
        clip=settings.cliprange_value,
    )
    spec = _spec_of(settings.loss_agg_mode, settings, case)
    (weights,), _ = step_weights([case.row()], spec, given=_given(settings))
    total = reduce_terms({"values": term}, weights, case.loss_mask_T)["total"].value
    total.backward()
    if _is_undefined(settings.loss_agg_mode, settings, weights["policy"]):
        total = undefined()
    clipped = Mean(EPSILON).over(term.clipped_T.double(), case.loss_mask_T).finish()
    return {"loss": total.detach(), "grad_values": leaf.grad, "metrics": {"vf_clipfrac": clipped}}


SYSTEM = System(
    name="verl",
    title=TITLE,
    version="1dda039b",
    settings=ActorSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS["verl"],
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=bypass_metrics,
    outputs=undefined_loss,
    replays={
        "policy_loss": actor_loss,
        "kl_estimator": penalty,
        "aggregation": aggregated,
        "value_loss": critic_loss,
        "advantage": advantages,
        "is_correction": is_correction(RolloutCorrection, translate_correction, correction_outputs),
    },
)
