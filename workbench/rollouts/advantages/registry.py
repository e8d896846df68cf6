"""Registry of advantage estimators under the name that a spec uses; each gives one number to every trained token.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.advantages.baselines import optimal_token_baseline, remax_advantages
from workbench.rollouts.advantages.groups import gdpo_advantages, gpg_advantages, group_advantages, pass_at_k_advantages
from workbench.rollouts.advantages.inputs import AdvantageInputs, Estimate
from workbench.rollouts.advantages.tokens import discounted_returns, gae, whiten

Estimator = Callable[..., Estimate]

_SETTINGS: dict[Estimator, tuple[str, ...]] = {}
"""Names of the settings of each estimator, from `_settings_of`."""


def estimate_advantages(
    name: str, inputs: AdvantageInputs, *, masked_in_baseline: bool = False, **settings: Any
) -> Estimate:
    """Compute the advantages of a whole step with one of `ESTIMATORS` and its settings.

    ``masked_in_baseline`` includes documents without a trained token (truncated, filtered) in baselines and deviations
    of their group; several trainers do, which changes every other completion's advantage.

    Raises:
        SpecError: an unknown name or setting, or a missing input of the estimator.

    Example:
        >>> inputs = AdvantageInputs(torch.tensor([0, 0, 1, 1]), torch.tensor([False, True, True, True]),
        ...                          torch.tensor([1.0, 0.0]), torch.tensor([5, 5]))
        >>> estimate_advantages("rloo", inputs).advantages_T.tolist()
        [0.0, 1.0, -1.0, -1.0]
    """
    if name not in ESTIMATORS:
        raise SpecError(f"advantages by {name!r}", rule=f"one of {', '.join(ESTIMATORS)}", fix="correct the spec")
    estimator = ESTIMATORS[name]
    known = _SETTINGS[estimator.func if isinstance(estimator, partial) else estimator]
    if unknown := sorted(set(settings) - set(known)):
        raise SpecError(
            f"advantages by {name!r} with {', '.join(unknown)}",
            rule=f"its settings are {', '.join(known) or 'none'}",
            fix="correct the spec",
        )
    if masked_in_baseline and name in WITHOUT_BASELINE:
        raise SpecError(
            f"advantages by {name!r} with masked_in_baseline",
            rule=f"{name} has no baseline of a group",
            fix="leave masked_in_baseline out, or choose an estimator that compares completions",
        )
    trained_N = torch.ones_like(inputs.lengths_N, dtype=torch.bool) if masked_in_baseline else inputs.lengths_N > 0
    return estimator(inputs, trained_N, **settings)


def _settings_of(*functions: Callable[..., Any], but: Sequence[str] = ()) -> Callable[[Estimator], Estimator]:
    """Name the settings of an estimator: its own keywords, and those of the functions to which it passes the others."""
    inputs = ("trained_N", "lengths_N", "weights_T", *but)

    def named(estimator: Estimator) -> Estimator:
        keywords = [p for f in (*functions, estimator) for p in inspect.signature(f).parameters.values()]
        names = [p.name for p in keywords if p.kind is p.KEYWORD_ONLY and p.name not in inputs]
        _SETTINGS[estimator] = tuple(dict.fromkeys(names))
        return estimator

    return named


@_settings_of(group_advantages)
def _by_group(inputs: AdvantageInputs, trained_N: Tensor, *, baseline: str = "mean", **settings: Any) -> Estimate:
    settings |= {"baseline": baseline, "lengths_N": inputs.lengths_N if baseline == "length_weighted" else None}
    advantages_N = group_advantages(inputs.shaped_rewards_N, inputs.group_ids_N, trained_N=trained_N, **settings)
    return Estimate(inputs.on_tokens(advantages_N))


@_settings_of()
def _by_group_undivided(
    inputs: AdvantageInputs, trained_N: Tensor, *, baseline: str = "mean", singleton: Literal["zero", "reward"] = "zero"
) -> Estimate:
    return _by_group(inputs, trained_N, baseline=baseline, scale="none", singleton=singleton)


def _of_documents(function: Callable[..., Tensor]) -> Estimator:
    """Estimator that applies a function of rewards and groups."""

    @_settings_of(function)
    def estimator(inputs: AdvantageInputs, trained_N: Tensor, **settings: Any) -> Estimate:
        advantages_N = function(inputs.shaped_rewards_N, inputs.group_ids_N, trained_N=trained_N, **settings)
        return Estimate(inputs.on_tokens(advantages_N))

    return estimator


@_settings_of(gdpo_advantages, but=["unscored"])
def _gdpo(inputs: AdvantageInputs, trained_N: Tensor, **settings: Any) -> Estimate:
    components_NK = _needed(inputs, "gdpo", "components_NK")
    if inputs.penalties_T is not None:
        raise SpecError(
            "advantages by 'gdpo' with penalties_T",
            rule="each component is normalised separately",
            fix="add the penalty of each document as a component of its own",
        )
    weights_K = components_NK.new_ones(components_NK.shape[1]) if inputs.weights_K is None else inputs.weights_K
    components_NK = components_NK.double()
    return Estimate(
        inputs.on_tokens(gdpo_advantages(components_NK, inputs.group_ids_N, weights_K, trained_N=trained_N, **settings))
    )


@_settings_of(whiten, but=["elsewhere"])
def _reinforce_plus_plus(
    inputs: AdvantageInputs, trained_N: Tensor, *, discount: float = 1.0, **settings: Any
) -> Estimate:
    returns_T = discounted_returns(inputs.on_each_token_T, inputs.document_ids_T, inputs.loss_mask_T, discount=discount)
    return Estimate(whiten(returns_T, inputs.loss_mask_T, **settings), returns_T)


@_settings_of(whiten, but=["elsewhere"])
def _reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, trained_N: Tensor, *, singleton: Literal["zero", "reward"] = "zero", **settings: Any
) -> Estimate:
    advantages_N = group_advantages(
        inputs.rewards_N.double(), inputs.group_ids_N, scale="none", trained_N=trained_N, singleton=singleton
    )
    advantages_T = inputs.on_tokens(advantages_N)
    if inputs.penalties_T is not None:
        advantages_T = torch.where(inputs.loss_mask_T, advantages_T - inputs.penalties_T.double(), 0.0)
    return Estimate(whiten(advantages_T, inputs.loss_mask_T, **settings))


@_settings_of(group_advantages, but=["baseline"])
def _grpo_whitened(
    inputs: AdvantageInputs, trained_N: Tensor, *, epsilon: float = 1e-6, count_epsilon: float = 0.0, **settings: Any
) -> Estimate:
    by_group = _by_group(inputs, trained_N, epsilon=epsilon, **settings)
    return Estimate(whiten(by_group.advantages_T, inputs.loss_mask_T, count_epsilon=count_epsilon))


@_settings_of(remax_advantages)
def _remax(inputs: AdvantageInputs, trained_N: Tensor, **settings: Any) -> Estimate:
    baselines_N = _needed(inputs, "remax", "baselines_N")
    return Estimate(
        *remax_advantages(inputs.on_each_token_T, baselines_N, inputs.document_ids_T, inputs.loss_mask_T, **settings)
    )


@_settings_of(optimal_token_baseline)
def _optimal_token_baseline(inputs: AdvantageInputs, trained_N: Tensor, **settings: Any) -> Estimate:
    name = "optimal_token_baseline"
    return Estimate(
        *optimal_token_baseline(
            inputs.on_each_token_T,
            _needed(inputs, name, "old_logprobs_T"),
            _needed(inputs, name, "squared_probabilities_T"),
            inputs.document_ids_T,
            inputs.loss_mask_T,
            inputs.group_ids_N,
            weights_T=inputs.correction_weights_T,
            **settings,
        )
    )


@_settings_of(gae)
def _gae(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    whitened: bool = False,
    elsewhere: Literal["zero", "carry"] = "zero",
    count_epsilon: float = 0.0,
    **settings: Any,
) -> Estimate:
    values_T = _needed(inputs, "gae", "values_T")
    advantages_T, returns_T = gae(
        inputs.on_each_token_T, values_T, inputs.document_ids_T, inputs.loss_mask_T, elsewhere=elsewhere, **settings
    )
    if whitened:
        advantages_T = whiten(
            advantages_T,
            inputs.loss_mask_T,
            count_epsilon=count_epsilon,
            elsewhere="whiten" if elsewhere == "carry" else "zero",
        )
    return Estimate(advantages_T, returns_T)


def _needed(inputs: AdvantageInputs, name: str, field: str) -> Tensor:
    value = getattr(inputs, field)
    if value is None:
        raise SpecError(
            f"advantages by {name!r}",
            found=f"no {field}",
            rule=f"{name} is computed from {field}",
            fix="pass them, or choose another estimator",
        )
    return value


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _by_group,
    "dr_grpo": _by_group_undivided,
    "rloo": partial(_by_group_undivided, baseline="leave_one_out"),
    "leave_one_out": partial(_by_group, baseline="leave_one_out", scale="leave_one_out_std", epsilon=1e-6),
    "opo": partial(_by_group_undivided, baseline="length_weighted"),
    "gpg": _of_documents(gpg_advantages),
    "pass_at_k": _of_documents(pass_at_k_advantages),
    "gdpo": _gdpo,
    "grpo_whitened": _grpo_whitened,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
    "optimal_token_baseline": _optimal_token_baseline,
    "gae": _gae,
    "vapo": partial(_gae, value_lambda=1.0, length_adaptive_alpha=0.05),
}
"""Estimators by the name that a spec uses. Called with (inputs, trained_N), settings by keyword."""

WITHOUT_BASELINE = frozenset({"reinforce_plus_plus", "remax", "optimal_token_baseline", "gae", "vapo"})
"""Estimators that do not compare completions with each other."""
