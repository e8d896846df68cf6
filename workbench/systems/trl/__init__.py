"""huggingface/trl: `GRPOTrainer`, its loss, its correction for vLLM and its advantages.

Letters: B rows | N documents | K rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from workbench.errors import SpecError
from workbench.losses.corrections import on_counted_tokens
from workbench.rollouts.advantages.groups import combine_components, gdpo_advantages, group_advantages
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case
from workbench.systems.metrics import PeerSettings, settings_of
from workbench.systems.registry import CORRECTION, LOGPROBS, System, parse_settings
from workbench.systems.replays import Replayed, case_metrics, evaluate_correction, policy_loss
from workbench.systems.trl import metrics as named
from workbench.systems.trl.dump import read_dump
from workbench.systems.trl.settings import COUNTED, AdvantageSettings, ISSettings, TRLSettings
from workbench.systems.trl.translate import CONTRACTS, back, bounded_ratio, counts, translate


def case_settings(case: Case) -> dict[str, Any]:
    """Return the options; some follow from the arrays: sampler log-probabilities, the shape of ready-made weights."""
    options = {
        "use_vllm": case.get("rollout_logprobs") is not None,
        "vllm_importance_sampling_correction": False,
        **case.config,
    }
    weights = case.get("is_weights")
    if weights is not None and (options.get("vllm_is") or options.get("loss_type") == "vespo"):
        options["vllm_is"] = "token" if weights.shape == case.shape else "sequence"
    return options


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Return the settings of metrics; means over rows become means over tokens if there is one advantage per token."""
    advantages = replayed.case.get("advantages")
    return settings_of(replayed.translation.spec, replayed.slots)._replace(
        token_advantages=advantages is not None and advantages.shape == replayed.case.shape
    )


def further_metrics(replayed: Replayed) -> dict[str, float]:
    """Return, with an entropy bonus, the loss without it, before the division by accumulation steps."""
    settings = replayed.settings
    if not isinstance(settings, TRLSettings) or not settings.entropy_coef:
        return {}
    scalars = replayed.evaluated.scalars
    parts = [float(scalars[name].value.detach()) for name in ("policy", "kl") if name in scalars]
    steps = 1 if settings.loss_type in COUNTED else settings.gradient_accumulation_steps
    return {"policy_loss": sum(parts) * steps}


def with_weights_of_rows(case: Case) -> Case:
    """Return the case as vespo reads it: with all weights of a row, also those where nothing counts."""
    weights = case.get("is_weights")
    if case.config.get("loss_type") != "vespo" or weights is None or weights.shape != case.shape:
        return case
    counts = case.loss_mask_T.reshape(case.shape)
    return replace(case, inputs={**case.inputs, "is_weights": on_counted_tokens(weights, counts)})


def policy_loss_case(case: Case) -> dict[str, Any]:
    """Replay the loss from log-probabilities."""
    return policy_loss(with_weights_of_rows(case))


def correction_case(case: Case) -> dict[str, Any]:
    """Replay the weights alone, also where nothing counts, where the ratio is 1; one per row in the sequence modes."""
    everywhere = {
        name: case.shaped(values_T)
        for name in ("old_logprobs", "rollout_logprobs")
        if (values_T := case.tokens(name)) is not None
    }
    case = replace(case, inputs=everywhere)
    settings = case.options(ISSettings)
    correction = bounded_ratio(settings.mode, settings.clip_min, settings.clip_max)
    replayed = evaluate_correction(case, settings, LossSpec(correction=correction))
    weights = case.shaped(replayed.evaluated.terms["policy"].extras["bounded_weight"])
    of_tokens = settings.mode.startswith("token")
    return {"is_weights": weights if of_tokens else weights[:, :1], "metrics": case_metrics(replayed)}


SCALES: dict[str | bool, Literal["std", "batch_std", "none"]] = {
    "group": "std",
    True: "std",
    "batch": "batch_std",
    "none": "none",
    False: "none",
}
"""``scale_rewards`` -> the scale of our estimator."""


def estimator_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings, from options by TRL's names.

    Raises:
        SpecError: an unknown option, or rewards that are normalised one by one.
    """
    settings = parse_settings(AdvantageSettings, options, where="trl")
    if settings.multi_objective_aggregation == "normalize_then_sum":
        raise SpecError(
            "TRL's normalize_then_sum in a step",
            rule="it normalises each reward, and a step has their sum",
            fix="leave advantages out: the recorded ones are then taken as they are",
        )
    return "grpo", {"scale": SCALES[settings.scale_rewards], "epsilon": settings.eps}


def advantage_case(case: Case) -> dict[str, Any]:
    """Replay advantages of rows, from one reward per function; a row that no function scored gets 0."""
    own = {name: value for name, value in case.config.items() if name != "reward_weights"}  # an array, too
    settings = parse_settings(AdvantageSettings, own, where=case.system)
    rewards_NK, weights_K = case["rewards_per_func"], case.get("reward_weights")
    weights_K = rewards_NK.new_ones(rewards_NK.shape[1]) if weights_K is None else weights_K
    groups_N = case.get("group_ids")
    if groups_N is None:
        size = settings.num_generations
        groups_N = torch.arange(len(rewards_NK) // size).repeat_interleave(size)
    if settings.multi_objective_aggregation == "normalize_then_sum":
        advantages_N = gdpo_advantages(rewards_NK, groups_N, weights_K, epsilon=settings.eps, unscored="skip")
    else:
        scale = SCALES[settings.scale_rewards]
        rewards_N, scored_N = combine_components(rewards_NK, weights_K)
        advantages_N = group_advantages(rewards_N, groups_N, scale=scale, epsilon=settings.eps, trained_N=scored_N)
    return {"advantages": advantages_N}


SYSTEM = System(
    name="trl",
    title="TRL",
    version="1.16.0",
    settings=TRLSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    temperature=lambda settings: settings.temperature,
    peer_settings=peer_settings,
    metrics=further_metrics,
    replays={"policy_loss": policy_loss_case, "is_correction": correction_case, "advantage": advantage_case},
    arrays=(*LOGPROBS, "is_weights", "entropies"),
    arrays_of={"is_correction": CORRECTION, "advantage": ("rewards_per_func", "reward_weights", "group_ids")},
    aliases=named.names,
    estimator=estimator_of,
    read_dump=read_dump,
)
