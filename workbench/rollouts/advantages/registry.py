"""Registry of advantage estimators under the name that a spec uses; each gives one number to every trained token.

Letters: T packed tokens | N documents | K components of a reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.advantages.baselines import optimal_token_baseline, remax_advantages
from workbench.rollouts.advantages.groups import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    pass_at_k_advantages,
)
from workbench.rollouts.advantages.tokens import discounted_returns, gae, token_rewards, whiten
from workbench.rollouts.batch import RolloutBatch
from workbench.shapes import check_shapes


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator: all documents of an optimizer step, token-aligned.

    Attributes:
        document_ids_T: [T] 0..N-1; anything below on padding.
        loss_mask_T: [T] bool, the token trains.
        rewards_N: [N] reward units.
        group_ids_N: [N] prompt of each document.
        penalties_T: [T] reward units, subtracted from the reward of each trained token (a KL in the reward), or None.
        values_T: [T] a critic's value of the state before the token, for "gae" and "vapo", or None.
        components_NK: [N, K] components of the reward, for "gdpo", or None.
        weights_K: [K] weights of the components, or None for 1 each.
        token_rewards_T: [T] reward units that a document earns at each token, instead of all at its last trained one;
            or None.
        baselines_N: [N] reward of the greedy completion of the same prompt, for "remax", or None.
        old_logprobs_T: [T] nats, for "optimal_token_baseline", or None.
        squared_probabilities_T: [T] sum over the vocabulary of squared probabilities, for "optimal_token_baseline", or
            None.
        correction_weights_T: [T] weights of a sampler correction, for "optimal_token_baseline", or None.
    """

    document_ids_T: Tensor
    loss_mask_T: Tensor
    rewards_N: Tensor
    group_ids_N: Tensor
    penalties_T: Tensor | None = None
    values_T: Tensor | None = None
    components_NK: Tensor | None = None
    weights_K: Tensor | None = None
    token_rewards_T: Tensor | None = None
    baselines_N: Tensor | None = None
    old_logprobs_T: Tensor | None = None
    squared_probabilities_T: Tensor | None = None
    correction_weights_T: Tensor | None = None

    def __post_init__(self) -> None:
        check_shapes("AdvantageInputs", **self.__dict__)

    @classmethod
    def of(cls, batch: RolloutBatch, **more: Tensor | None) -> AdvantageInputs:
        """Read the documents of a batch; further fields by name.

        A greedy completion's reward and sums of squared probabilities are the extensions "baselines" and
        "squared_probabilities".

        Raises:
            SpecError: a batch without rewards or groups.
        """
        if batch.rewards_N is None or batch.group_ids_N is None:
            raise SpecError(
                "advantages of a batch",
                found="no rewards_N or no group_ids_N",
                rule="advantages compare rewards within a group",
                fix="give the batch both",
            )
        extensions = {
            field: None if name not in batch.extensions else batch.extensions[name].values
            for field, name in (("baselines_N", "baselines"), ("squared_probabilities_T", "squared_probabilities"))
        }
        return cls(
            batch.document_ids_T,
            batch.loss_mask_T,
            batch.rewards_N,
            batch.group_ids_N,
            **({"old_logprobs_T": batch.old_logprobs_T} | extensions | more),
        )

    @classmethod
    def of_token_rewards(
        cls,
        document_ids_T: Tensor,
        loss_mask_T: Tensor,
        token_rewards_T: Tensor,
        group_ids_N: Tensor,
        **more: Tensor | None,
    ) -> AdvantageInputs:
        """Documents that earn rewards at their tokens; the reward of a document is their sum, trained or not."""
        there_T = document_ids_T >= 0
        earned_T = torch.where(there_T, token_rewards_T.double(), 0.0)
        rewards_N = earned_T.new_zeros(len(group_ids_N)).index_add(0, document_ids_T.clamp_min(0), earned_T)
        return cls(document_ids_T, loss_mask_T, rewards_N, group_ids_N, token_rewards_T=token_rewards_T, **more)

    @property
    def on_each_token_T(self) -> Tensor:
        """[T] float64: reward of each trained token minus its penalty; 0 elsewhere."""
        if self.token_rewards_T is None:
            return token_rewards(self.rewards_N, self.document_ids_T, self.loss_mask_T, self.penalties_T)
        penalties_T = 0.0 if self.penalties_T is None else self.penalties_T.double()
        return torch.where(self.loss_mask_T, self.token_rewards_T.double() - penalties_T, 0.0)

    @property
    def lengths_N(self) -> Tensor:
        """[N] trained tokens of each document."""
        return torch.bincount(self.document_ids_T[self.loss_mask_T], minlength=len(self.rewards_N))

    @property
    def shaped_rewards_N(self) -> Tensor:
        """[N] float64: rewards minus the penalties of the document's trained tokens."""
        rewards_N = self.rewards_N.double()
        if self.penalties_T is None:
            return rewards_N
        penalties = self.penalties_T[self.loss_mask_T].double()
        return rewards_N.index_add(0, self.document_ids_T[self.loss_mask_T], -penalties)

    def on_tokens(self, values_N: Tensor) -> Tensor:
        """[T] float64: a document's value on each of its trained tokens, 0 elsewhere."""
        whole_T = values_N.double()[self.document_ids_T.clamp(min=0)]
        return torch.where(self.loss_mask_T, whole_T, 0.0)


class Estimate(NamedTuple):
    """Advantages of tokens, and targets of a critic.

    Attributes:
        advantages_T: [T] float64, 0 where nothing counts.
        returns_T: [T] float64, the targets of a critic; None for estimators of whole completions.
    """

    advantages_T: Tensor
    returns_T: Tensor | None = None


def estimate_advantages(
    name: str, inputs: AdvantageInputs, *, masked_in_baseline: bool = False, **settings: Any
) -> Estimate:
    """Compute advantages with a named estimator.

    Args:
        name: one of `ESTIMATORS`.
        inputs: the whole step.
        masked_in_baseline: include documents without a trained token (truncated, filtered) in baselines and
            deviations of their group; several trainers do, which changes every other completion's advantage.
        **settings: of the estimator, see `ESTIMATORS`.

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
    known = [p.name for p in inspect.signature(estimator).parameters.values()][2:]
    unknown = sorted(set(settings) - set(known))
    if unknown:
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


def _by_group(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    baseline: str = "mean",
    scale: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-4,
    singleton: str = "zero",
) -> Estimate:
    lengths_N = inputs.lengths_N if baseline == "length_weighted" else None
    advantages_N = group_advantages(
        inputs.shaped_rewards_N,
        inputs.group_ids_N,
        baseline=baseline,
        scale=scale,
        ddof=ddof,
        epsilon=epsilon,
        singleton=singleton,
        trained_N=trained_N,
        lengths_N=lengths_N,
    )
    return Estimate(inputs.on_tokens(advantages_N))


def _by_group_undivided(
    inputs: AdvantageInputs, trained_N: Tensor, *, baseline: str = "mean", singleton: str = "zero"
) -> Estimate:
    return _by_group(inputs, trained_N, baseline=baseline, scale="none", singleton=singleton)


def _pass_at_k(inputs: AdvantageInputs, trained_N: Tensor, *, scale: str = "std", epsilon: float = 1e-6) -> Estimate:
    return Estimate(
        inputs.on_tokens(
            pass_at_k_advantages(
                inputs.shaped_rewards_N, inputs.group_ids_N, scale=scale, epsilon=epsilon, trained_N=trained_N
            )
        )
    )


def _gpg(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    divisor: float = 1.0,
    informative: str = "unequal_groups",
    singleton: str = "zero",
) -> Estimate:
    return Estimate(
        inputs.on_tokens(
            gpg_advantages(
                inputs.shaped_rewards_N,
                inputs.group_ids_N,
                divisor=divisor,
                informative=informative,
                singleton=singleton,
                trained_N=trained_N,
            )
        )
    )


def _gdpo(inputs: AdvantageInputs, trained_N: Tensor, *, ddof: int = 1, epsilon: float = 1e-4) -> Estimate:
    components_NK = _needed(inputs, "gdpo", "components_NK")
    if inputs.penalties_T is not None:
        raise SpecError(
            "advantages by 'gdpo' with penalties_T",
            rule="each component is normalised separately",
            fix="add the penalty of each document as a component of its own",
        )
    weights_K = components_NK.new_ones(components_NK.shape[1]) if inputs.weights_K is None else inputs.weights_K
    return Estimate(
        inputs.on_tokens(
            gdpo_advantages(
                components_NK.double(), inputs.group_ids_N, weights_K, ddof=ddof, epsilon=epsilon, trained_N=trained_N
            )
        )
    )


def _reinforce_plus_plus(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    discount: float = 1.0,
    ddof: int = 1,
    epsilon: float = 1e-8,
    epsilon_form: str = "add",
    count_epsilon: float = 0.0,
) -> Estimate:
    returns_T = discounted_returns(inputs.on_each_token_T, inputs.document_ids_T, inputs.loss_mask_T, discount=discount)
    return Estimate(
        whiten(
            returns_T,
            inputs.loss_mask_T,
            ddof=ddof,
            epsilon=epsilon,
            epsilon_form=epsilon_form,
            count_epsilon=count_epsilon,
        ),
        returns_T,
    )


def _reinforce_plus_plus_baseline(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    ddof: int = 1,
    epsilon: float = 1e-8,
    epsilon_form: str = "add",
    singleton: str = "zero",
    count_epsilon: float = 0.0,
) -> Estimate:
    advantages_N = group_advantages(
        inputs.rewards_N.double(), inputs.group_ids_N, scale="none", trained_N=trained_N, singleton=singleton
    )
    advantages_T = inputs.on_tokens(advantages_N)
    if inputs.penalties_T is not None:
        advantages_T = torch.where(inputs.loss_mask_T, advantages_T - inputs.penalties_T.double(), 0.0)
    return Estimate(
        whiten(
            advantages_T,
            inputs.loss_mask_T,
            ddof=ddof,
            epsilon=epsilon,
            epsilon_form=epsilon_form,
            count_epsilon=count_epsilon,
        )
    )


def _grpo_whitened(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    scale: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
    singleton: str = "zero",
    count_epsilon: float = 0.0,
) -> Estimate:
    by_group = _by_group(inputs, trained_N, scale=scale, ddof=ddof, epsilon=epsilon, singleton=singleton)
    return Estimate(whiten(by_group.advantages_T, inputs.loss_mask_T, count_epsilon=count_epsilon))


def _remax(inputs: AdvantageInputs, trained_N: Tensor, *, elsewhere: str = "zero") -> Estimate:
    return Estimate(
        *remax_advantages(
            inputs.on_each_token_T,
            _needed(inputs, "remax", "baselines_N"),
            inputs.document_ids_T,
            inputs.loss_mask_T,
            elsewhere=elsewhere,
        )
    )


def _optimal_token_baseline(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    aligned: str = "position",
    zero_tail: bool = True,
    epsilon: float = 1e-8,
    elsewhere: str = "zero",
) -> Estimate:
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
            aligned=aligned,
            zero_tail=zero_tail,
            epsilon=epsilon,
            elsewhere=elsewhere,
        )
    )


def _gae(
    inputs: AdvantageInputs,
    trained_N: Tensor,
    *,
    discount: float = 1.0,
    policy_lambda: float = 0.95,
    value_lambda: float | None = None,
    length_adaptive_alpha: float | None = None,
    whitened: bool = False,
    elsewhere: str = "zero",
    count_epsilon: float = 0.0,
) -> Estimate:
    advantages_T, returns_T = gae(
        inputs.on_each_token_T,
        _needed(inputs, "gae", "values_T"),
        inputs.document_ids_T,
        inputs.loss_mask_T,
        discount=discount,
        policy_lambda=policy_lambda,
        value_lambda=value_lambda,
        length_adaptive_alpha=length_adaptive_alpha,
        elsewhere=elsewhere,
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


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "grpo": _by_group,
    "dr_grpo": _by_group_undivided,
    "rloo": partial(_by_group_undivided, baseline="leave_one_out"),
    "leave_one_out": partial(_by_group, baseline="leave_one_out", scale="leave_one_out_std", epsilon=1e-6),
    "opo": partial(_by_group_undivided, baseline="length_weighted"),
    "gpg": _gpg,
    "pass_at_k": _pass_at_k,
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
