"""Rewards of whole completions, shaped before advantages are computed: penalties for length, and bounds.

A KL penalty acts on tokens: `workbench.losses.kl.kl_in_reward` and `workbench.rollouts.advantages.token_rewards`.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.shapes import check_shapes


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

    Formula: ``coefficient * kl``, which `workbench.rollouts.advantages.token_rewards` subtracts.
    Shapes:  [T] nats -> [T] reward units.
    Source:  InstructGPT, arXiv 2203.02155, equation 2.
    """
    return coefficient * kl_T
