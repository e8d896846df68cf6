"""Replays of verl-project/verl's functions from their arrays.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

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
from workbench.systems.alias import PeerSettings, settings_of
from workbench.systems.case import Case
from workbench.systems.empty_batch import undefined
from workbench.systems.registry import parse_settings
from workbench.systems.replays import Replayed, aggregation, kl_estimator, policy_loss
from workbench.systems.verl.correction import (
    EPSILON,
    TITLE,
    gates_of,
    weights_of,
)
from workbench.systems.verl.settings import (
    BY_DOCUMENT,
    ActorSettings,
    AggregationSettings,
    GlobalBatchInfo,
    KLSettings,
    ValueSettings,
)
from workbench.systems.verl.translate import CONTRACTS, denominator, given, kl

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
    return {"loss": undefined()} if _is_undefined(agg, settings.global_batch_info, replayed.weights["policy"]) else {}


def _is_undefined(agg: str, info: GlobalBatchInfo, weights: TokenWeights) -> bool:
    """True if a mean is taken over nothing."""
    count = {"token-mean": info.batch_num_tokens, "token-sum": 1.0}.get(agg, info.global_batch_size)
    return count is None and not weights.loss_T.any()


def bypass_metrics(replayed: Replayed) -> dict[str, float]:
    """Return importance weights, which bypass_mode reports even if its loss does not use them."""
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
    corrected = spec.model_copy(update={"correction": CorrectionSpec(**(weights | gates_of(chosen)))})
    term = apply_correction(replayed.evaluated.terms["policy"], replayed.inputs, corrected.correction)
    values = aliases.as_named_by(
        "verl",
        replayed.inputs,
        replayed.row.loss_mask_T,
        terms={"policy": term},
        loss_spec=corrected,
        slots=replayed.slots,
        settings=settings_of(corrected, replayed.slots)._replace(single=True),
    )
    return {name: value.finish() for name, value in values.items() if name.startswith("rollout_corr/rollout_is")}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the counts of the mini-batch, which are separate arguments or one mapping."""
    options = dict(config)
    return {**(options.pop("global_batch_info", None) or {}), **options}


def aggregated_spec(case: Case) -> LossSpec:
    """Return denominator and scaling of `agg_loss`, as a spec."""
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
            fix="set batch_num_tokens and global_batch_size",
        )
    epsilon = EPSILON if agg == "seq-mean-token-mean" else 0.0
    return LossSpec(
        name="ppo",
        **denominator(agg, info.loss_scale_factor or case.shape[-1]),
        **more,
        scaling=CONTRACTS["fsdp"].model_copy(update={"length_epsilon": epsilon}),
    )


def aggregated_counts(case: Case) -> GivenCounts:
    """Return the counts that `agg_loss` was given."""
    return given(parse_settings(AggregationSettings, _flat(case.config), where=TITLE))


def estimated_spec(case: Case) -> LossSpec:
    """Return the spec of the KL penalty alone."""
    settings = parse_settings(KLSettings, _flat(case.config), where=TITLE)
    return _spec_of(settings.loss_agg_mode, settings, case, kl={"coefficient": 1.0, **kl(settings.kl_penalty)})


def aggregated(case: Case) -> dict[str, Any]:
    """Replay `agg_loss`."""
    return _or_undefined(case, aggregation(aggregated_spec, aggregated_counts)(case), AggregationSettings)


def penalty(case: Case) -> dict[str, Any]:
    """Replay `kl_penalty`, and `agg_loss` of it if no cotangent is given."""
    return _or_undefined(case, kl_estimator(estimated_spec)(case), KLSettings)


def _or_undefined(case: Case, outputs: dict[str, Any], model: type[GlobalBatchInfo]) -> dict[str, Any]:
    """Return the outputs with NaN in place of a mean over nothing."""
    settings = parse_settings(model, _flat(case.config), where=TITLE)
    (weights,), _ = step_weights([case.row()], LossSpec(name="ppo"))
    empty = _is_undefined(settings.loss_agg_mode, settings, weights["policy"])
    return outputs | {"loss": undefined()} if empty and "loss" in outputs else outputs


def critic_loss(case: Case) -> dict[str, Any]:
    """Replay `compute_value_loss`."""
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
    (weights,), _ = step_weights([case.row()], spec, given=given(settings))
    total = reduce_terms({"values": term}, weights, case.loss_mask_T)["total"].value
    total.backward()
    if _is_undefined(settings.loss_agg_mode, settings, weights["policy"]):
        total = undefined()
    clipped = Mean(EPSILON).over(term.clipped_T.double(), case.loss_mask_T).finish()
    return {"loss": total.detach(), "grad_values": leaf.grad, "metrics": {"vf_clipfrac": clipped}}
