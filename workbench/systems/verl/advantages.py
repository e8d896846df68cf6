"""verl's advantage estimators, by the names of its registry (``trainer/ppo/core_algos.py``, 1dda039b)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field

from workbench.rollouts.advantages.inputs import AdvantageInputs
from workbench.rollouts.advantages.registry import estimate_advantages
from workbench.systems.case import Case
from workbench.systems.registry import Settings, parse_settings
from workbench.systems.verl.correction import EPSILON, TITLE


class AdvantageSettings(Settings):
    """An advantage estimator (`AlgoConfig` and the functions' own arguments, 1dda039b)."""

    estimator: Literal[
        "gae",
        "grpo",
        "grpo_vectorized",
        "grpo_passk",
        "gdpo",
        "rloo",
        "rloo_vectorized",
        "opo",
        "remax",
        "gpg",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
    ]
    """Name in the registry."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_vectorized, grpo_passk, gdpo: divide by the group's deviation."""
    epsilon: float | None = Field(None, ge=0)
    """Added to denominators; None: 1e-6, and 1e-8 for the optimal token baselines."""
    gamma: float = 1.0
    """gae, reinforce_plus_plus: discount."""
    lam: float = 1.0
    """gae: lambda."""
    f_norm: float = Field(1.0, gt=0)
    """gpg: divisor."""
    alpha: float = 1.0
    """gpg: overwritten by verl with sequences / sequences with a reward other than 0."""
    handle_zero_tail: bool = True
    """Optimal token baselines: no baseline where only the longest completion of a group still runs."""


def advantages(case: Case) -> dict[str, Any]:
    """Replay an estimator of the registry; its returns are the advantages if it has none of its own."""
    config = {"estimator": _estimator(case.function)} | dict(case.config)
    settings = parse_settings(AdvantageSettings, config, where=TITLE)
    groups = case.get("group_ids")
    inputs = AdvantageInputs.of_token_rewards(
        case.document_ids_T,
        case.loss_mask_T,
        case["token_rewards"].reshape(-1),
        torch.arange(case["mask"].shape[0]) if groups is None else groups,
        values_T=case.everywhere("values"),
        baselines_N=case.get("baselines"),
        old_logprobs_T=case.everywhere("old_logprobs"),
        squared_probabilities_T=case.everywhere("sum_pi_squared"),
        correction_weights_T=case.everywhere("is_weights"),
    )
    name, options = estimator(settings)
    result = estimate_advantages(name, inputs, **options)
    returns_T = result.advantages_T if result.returns_T is None else result.returns_T
    return {"advantages": case.shaped(result.advantages_T), "returns": case.shaped(returns_T)}


def _estimator(function: str) -> str:
    """Return the name in the registry of a function."""
    name = function.split()[0].removeprefix("compute_").removesuffix("_return").removesuffix("_advantage")
    name = name.removesuffix("_outcome")
    return "tir_optimal_token_baseline" if name == "multi_turn_optimal_token_baseline" else name


def estimator_of(options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings, from options by verl's names.

    Raises:
        SpecError: an unknown option or estimator.
    """
    return estimator(parse_settings(AdvantageSettings, options, where=TITLE))


def estimator(settings: AdvantageSettings) -> tuple[str, dict[str, Any]]:
    """Return the workbench's estimator and its settings. Sequences without trained tokens count in their group in verl.

    verl's grpo_vectorized takes means and deviations in float32, here they are float64.
    """
    name = settings.estimator
    small = 1e-6 if settings.epsilon is None else settings.epsilon
    scale = "std" if settings.norm_adv_by_std_in_grpo else "none"
    singleton, whitened = {"singleton": "reward"}, {"count_epsilon": EPSILON}
    if name == "gae":
        lambdas = {"discount": settings.gamma, "policy_lambda": settings.lam}
        return "gae", {**lambdas, "whitened": True, "elsewhere": "carry", **whitened}
    if name == "reinforce_plus_plus":
        return name, {"discount": settings.gamma, **whitened}
    if name == "remax":
        return name, {"elsewhere": "carry"}
    if name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        return "optimal_token_baseline", {
            "aligned": "position" if name == "optimal_token_baseline" else "trained",
            "zero_tail": settings.handle_zero_tail,
            "elsewhere": "carry",
            "epsilon": 1e-8 if settings.epsilon is None else settings.epsilon,
        }
    of_groups: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("grpo", {"scale": scale, "epsilon": small, **singleton}),
        "grpo_vectorized": ("grpo", {"scale": scale, "epsilon": small, **singleton}),
        "grpo_passk": ("pass_at_k", {"scale": scale, "epsilon": small}),
        "gdpo": ("grpo_whitened", {"scale": scale, "epsilon": small, **singleton, **whitened}),
        "rloo": ("rloo", singleton),
        "rloo_vectorized": ("rloo", {}),
        "opo": ("opo", singleton),
        "gpg": ("gpg", {"divisor": settings.f_norm, "informative": "rewards_not_zero", **singleton}),
        "reinforce_plus_plus_baseline": (name, {**singleton, **whitened}),
    }
    ours, options = of_groups[name]
    return ours, {**options, "masked_in_baseline": True}
