"""Inputs and result of an advantage estimator, and the shaping of rewards before it: penalties for length, and bounds.

A KL penalty acts on tokens: `workbench.losses.kl.kl_in_reward` and `tokens.token_rewards`.

Letters: T packed tokens | N documents | K components of a reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.advantages.tokens import token_rewards
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
        """Read the documents of a batch, with its extensions "baselines" and "squared_probabilities"; ``more`` by name.

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
        known: dict[str, Tensor | None] = {
            field: batch.extensions[name].values
            for field, name in (("baselines_N", "baselines"), ("squared_probabilities_T", "squared_probabilities"))
            if name in batch.extensions
        }
        known |= {"old_logprobs_T": batch.old_logprobs_T, **more}
        return cls(batch.document_ids_T, batch.loss_mask_T, batch.rewards_N, batch.group_ids_N, **known)

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
        return torch.where(self.loss_mask_T, values_N.double()[self.document_ids_T.clamp(min=0)], 0.0)


class Estimate(NamedTuple):
    """Advantages [T], 0 where nothing counts, and targets of a critic [T], None for estimators of whole completions.

    Both are float64.
    """

    advantages_T: Tensor
    returns_T: Tensor | None = None


def overlong(rewards_N: Tensor, lengths_N: Tensor, *, max_length: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """Subtract a penalty from completions near max_length: 0 up to the buffer, the whole penalty at its end.

    Formula: ``R + min(0, -penalty (length - (max_length - buffer)) / buffer)``. Beyond max_length it keeps growing.
    Shapes:  [N] each -> [N] in the dtype of the rewards. Units: reward units.
    Raises:  SpecError: a buffer that is not between 1 and max_length, a negative penalty.
    Source:  soft overlong punishment: DAPO, arXiv 2503.14476, equation 13, with penalty 1.
    Differs: the paper's penalty stops at max_length, where generation does; NeMo-RL's and verl's do not stop.
    """
    if not 0 < buffer <= max_length or penalty < 0:
        raise SpecError(
            f"overlong(max_length={max_length}, buffer={buffer}, penalty={penalty})",
            rule="the buffer is the last part of max_length; a penalty is not negative",
            fix="correct the settings",
        )
    check_shapes("overlong", rewards_N=rewards_N, lengths_N=lengths_N)
    beyond_N = lengths_N.to(rewards_N.dtype) - (max_length - buffer)
    return rewards_N + (-beyond_N / buffer * penalty).clamp(max=0.0)


def stop_properly(rewards_N: Tensor, truncated_N: Tensor, *, coefficient: float) -> Tensor:
    """Scale down the reward of a truncated completion.

    Formula: ``coefficient R`` where the completion was truncated, else R.
    Shapes:  [N], [N] bool -> [N].
    Raises:  SpecError: a coefficient outside 0 to 1.
    Source:  NVIDIA-NeMo/RL, stop_properly_penalty_coef.
    """
    if not 0 <= coefficient <= 1:
        raise SpecError(
            f"stop_properly(coefficient={coefficient})",
            rule="a coefficient lies between 0 and 1",
            fix="0 removes the whole reward, 1 nothing",
        )
    check_shapes("stop_properly", rewards_N=rewards_N, truncated_N=truncated_N)
    return torch.where(truncated_N, coefficient * rewards_N, rewards_N)


def bounded(rewards_N: Tensor, low: float, high: float) -> Tensor:
    """Clamp rewards to two bounds.

    Formula: ``min(max(R, low), high)``.
    Shapes:  [N] -> [N].
    Raises:  SpecError: low above high.
    Source:  OpenRLHF, reward_clip_range.
    """
    if low > high:
        raise SpecError(f"bounded(low={low}, high={high})", rule="low is at most high", fix="swap them")
    return rewards_N.clamp(low, high)


def kl_penalties(kl_T: Tensor, coefficient: float) -> Tensor:
    """Penalty on the reward of each token for a divergence that was estimated elsewhere.

    Formula: ``coefficient * kl``, which `workbench.rollouts.advantages.tokens.token_rewards` subtracts.
    Shapes:  [T] nats -> [T] reward units.
    Source:  InstructGPT, arXiv 2203.02155, equation 2.
    """
    return coefficient * kl_T
