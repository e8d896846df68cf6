"""verl-project/verl: the actor's policy losses, its critic, advantage estimators and rollout correction.

Names and defaults are those of `ActorConfig`, `PolicyLossConfig`, `RolloutCorrectionConfig` and of the functions in
``trainer/ppo/core_algos.py`` and ``rollout_corr_helper.py``.

Letters: T packed tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.corrections import apply_correction, correct
from workbench.metrics.values import Mean
from workbench.specs.losses import CorrectionSpec, LossSpec
from workbench.systems.case import Case
from workbench.systems.empty_batch import undefined
from workbench.systems.metrics import PeerSettings, settings_of
from workbench.systems.registry import BATCH, LOGPROBS, VALUES, System, parse_settings
from workbench.systems.replays import (
    Replayed,
    aggregation,
    case_metrics,
    critic_loss,
    evaluate_correction,
    kl_estimator,
    named_metrics,
    policy_loss,
)
from workbench.systems.verl import metrics as named
from workbench.systems.verl.advantages import advantages, estimator_of
from workbench.systems.verl.correction import EPSILON, TITLE, RolloutCorrection, gates_of, live_weights_of, weights_of
from workbench.systems.verl.dump import read_dump
from workbench.systems.verl.settings import (
    BY_DOCUMENT,
    ActorSettings,
    AggregationSettings,
    GlobalBatchInfo,
    KLSettings,
    ValueSettings,
)
from workbench.systems.verl.translate import CONTRACTS, back, counts, denominator, given, kl, translate

OF_LOSS = ("actor/pg_clipfrac", "actor/ppo_kl")
"""Names that a policy loss reports."""


def case_settings(case: Case) -> dict[str, Any]:
    """Return the options; the function's name selects the loss, and arrays give the padded width and weights."""
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


def actor_loss(case: Case) -> dict[str, Any]:
    """Replay a policy loss. In bypass mode the old policy of a correction is the live one, not the recorded one."""
    live = "bypass" in case.function or "reinforce" in case.function
    inputs = {name: value for name, value in case.inputs.items() if not (live and name == "old_logprobs")}
    if live and "rollout_logprobs" not in inputs and case.get("old_logprobs") is not None:
        inputs["rollout_logprobs"] = case["old_logprobs"]
    return policy_loss(replace(case, inputs=inputs))


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Return the settings of metrics: a loss reports itself, and in bypass mode its correction; a correction itself.

    In a loss, verl's shares of sequences are means of flags in single precision, for any log-probabilities.
    """
    settings, peer = replayed.settings, settings_of(replayed.translation.spec, replayed.slots)
    if not isinstance(settings, ActorSettings):
        return peer._replace(only=("rollout_corr/",))
    bypass = settings.policy_loss.loss_mode == "bypass_mode"
    return peer._replace(single=True, only=(*OF_LOSS, "rollout_corr/") if bypass else OF_LOSS)


def undefined_loss(replayed: Replayed) -> dict[str, Tensor]:
    """Return NaN if `agg_loss` divides by 0: nothing counts here, and no count of the mini-batch was given.

    The gradient stays 0: tokens that masked_sum leaves out have none, for any divisor.
    """
    settings = replayed.settings
    if not isinstance(settings, ActorSettings) or settings.policy_loss.loss_mode == "geo_mean":
        return {}
    mode = settings.policy_loss.loss_mode
    agg = "seq-mean-token-mean" if mode in BY_DOCUMENT else settings.loss_agg_mode
    counted_T = replayed.weights["policy"].loss_T  # 0 where a gate rejects, too
    return _or_undefined({}, counted_T, agg, settings.global_batch_info)


def _or_undefined(outputs: dict[str, Any], counted_T: Tensor, agg: str, info: GlobalBatchInfo) -> dict[str, Any]:
    """Return the outputs, with NaN for the loss if a mean is taken over nothing."""
    count = {"token-mean": info.batch_num_tokens, "token-sum": 1.0}.get(agg, info.global_batch_size)
    return outputs | {"loss": undefined()} if count is None and not counted_T.any() else outputs


def bypass_metrics(replayed: Replayed) -> dict[str, float]:
    """Return importance weights, which bypass_mode reports even if its loss does not use them."""
    settings = replayed.settings
    if not isinstance(settings, ActorSettings) or settings.policy_loss.loss_mode != "bypass_mode":
        return {}
    spec, chosen = replayed.translation.spec, settings.policy_loss.rollout_correction
    if chosen is None:
        return {}
    weights = live_weights_of(chosen)
    if not weights or spec.surrogate.kind != "ppo":
        return {}
    corrected = spec.model_copy(update={"correction": CorrectionSpec(**(weights | gates_of(chosen)))})
    term = apply_correction(replayed.evaluated.terms["policy"], replayed.inputs, corrected.correction)
    peer = settings_of(corrected, replayed.slots)._replace(single=True)
    values = named_metrics(replayed, peer, corrected, {"policy": term})
    return {name: value for name, value in values.items() if name.startswith("rollout_corr/rollout_is")}


def correction_case(case: Case) -> dict[str, Any]:
    """Replay a correction alone: the mask after the gates, and weights, which rejected tokens keep."""
    settings = case.options(RolloutCorrection)
    weights = weights_of(settings)
    spec = LossSpec(name="ppo", correction=weights | gates_of(settings))
    replayed = evaluate_correction(case, settings, spec)
    mask_T = correct(replayed.inputs, spec.correction).passed_T
    outputs = {"mask": case.shaped(mask_T.double())}
    if weights:
        outputs["is_weights"] = case.shaped(correct(replayed.inputs, CorrectionSpec(**weights)).weights_T)
    return {**outputs, "metrics": case_metrics(replayed)}


def _options(model: type[AggregationSettings], case: Case) -> Any:
    """Return the options, with the counts of the mini-batch, which are separate arguments or one mapping."""
    options = dict(case.config)
    return parse_settings(model, {**(options.pop("global_batch_info", None) or {}), **options}, where=TITLE)


def _spec_of(settings: AggregationSettings, case: Case, **more: Any) -> LossSpec:
    agg = settings.loss_agg_mode
    count = settings.batch_num_tokens if agg == "token-mean" else settings.global_batch_size
    if settings.dp_size > 1 and agg != "token-sum" and count is None:
        raise SpecError(
            f"verl's agg_loss with dp_size = {settings.dp_size}",
            found="no count of the whole mini-batch",
            rule="a rank of several cannot count it",
            fix="set batch_num_tokens and global_batch_size",
        )
    epsilon = EPSILON if agg == "seq-mean-token-mean" else 0.0
    scaling = CONTRACTS["fsdp"].model_copy(update={"length_epsilon": epsilon})
    reduction = denominator(agg, settings.loss_scale_factor or case.shape[-1])
    return LossSpec(name="ppo", **reduction, **more, compat={"scaling": scaling})


def aggregated(case: Case) -> dict[str, Any]:
    """Replay `agg_loss`."""
    settings = _options(AggregationSettings, case)
    outputs = aggregation(case, _spec_of(settings, case), given(settings))
    return _or_undefined(outputs, case.loss_mask_T, settings.loss_agg_mode, settings)


def penalty(case: Case) -> dict[str, Any]:
    """Replay `kl_penalty`, and `agg_loss` of it if no cotangent is given."""
    settings = _options(KLSettings, case)
    outputs = kl_estimator(case, _spec_of(settings, case, kl={"coefficient": 1.0, **kl(settings.kl_penalty)}))
    return _or_undefined(outputs, case.loss_mask_T, settings.loss_agg_mode, settings) if "loss" in outputs else outputs


def critic(case: Case) -> dict[str, Any]:
    """Replay `compute_value_loss`."""
    settings = _options(ValueSettings, case)
    outputs, term = critic_loss(case, _spec_of(settings, case), given(settings), clip=settings.cliprange_value)
    assert term.clipped_T is not None, "cliprange_value is a clip"
    clipped = Mean(EPSILON).over(term.clipped_T.double(), case.loss_mask_T).finish()
    outputs["metrics"] = {"vf_clipfrac": clipped}
    return _or_undefined(outputs, case.loss_mask_T, settings.loss_agg_mode, settings)


SYSTEM = System(
    name="verl",
    title=TITLE,
    version="0.9.1",
    settings=ActorSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    peer_settings=peer_settings,
    metrics=bypass_metrics,
    outputs=undefined_loss,
    replays={
        "policy_loss": actor_loss,
        "kl_estimator": penalty,
        "aggregation": aggregated,
        "value_loss": critic,
        "advantage": advantages,
        "is_correction": correction_case,
    },
    arrays=(*LOGPROBS, "is_weights", "entropies"),
    arrays_of={
        "kl_estimator": (*BATCH, "cotangent"),
        "aggregation": VALUES,
        "value_loss": VALUES,
        "advantage": (
            *BATCH,
            "token_rewards",
            "rewards",
            "group_ids",
            "values",
            "baselines",
            "sum_pi_squared",
            "is_weights",
        ),
        "is_correction": BATCH,
    },
    aliases=named.names,
    estimator=estimator_of,
    read_dump=read_dump,
)
