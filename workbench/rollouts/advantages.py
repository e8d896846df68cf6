"""Advantages: how much better an answer did than the other answers to its prompt.

Letters: N documents.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.shapes import check_shapes


def group_advantages(rewards_N: Tensor, group_ids_N: Tensor, *, scale: Literal["std", "none"] = "std",
                     ddof: int = 1, epsilon: float = 1e-4) -> Tensor:
    """How far a reward is from the mean of its group, in standard deviations of the group or in reward units.

    A group whose rewards are all equal, a group of one included, says nothing about its answers: exactly 0.
    So does, for "std", a group of no more than ddof answers, whose deviation cannot be estimated.

    Formula: ``(r - mean_group) / (std_group + epsilon)``, or ``r - mean_group`` with ``scale="none"``.

    Shapes: rewards_N [N], group_ids_N [N] -> [N], in the dtype of the rewards; computed in float64.
    Units:  standard deviations ("std") or reward units ("none").
    Raises: ShapeError for shapes that disagree or a reward that is not finite; SpecError for another scale,
        or a ddof or an epsilon below 0.
    Source: "std" is GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1.2, which leaves ddof and epsilon open;
        trainers use ddof 1 (0 in a few) and epsilon 1e-4 or 1e-6. "none" is Dr. GRPO (arXiv 2503.20783).

    Example:
        >>> rewards_N, group_ids_N = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 3, 3])
        >>> group_advantages(rewards_N, group_ids_N, scale="none").tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    if scale not in ("std", "none") or ddof < 0 or epsilon < 0:
        raise SpecError(f"group_advantages(scale={scale!r}, ddof={ddof}, epsilon={epsilon})",
                        rule='scale is "std" or "none"; ddof and epsilon are not negative',
                        fix='scale="std" is GRPO, scale="none" is Dr. GRPO')
    check_shapes("group_advantages", rewards_N=rewards_N, group_ids_N=group_ids_N)
    if not torch.isfinite(rewards_N).all():
        bad = torch.nonzero(~torch.isfinite(rewards_N)).squeeze(1).tolist()
        raise ShapeError("group_advantages: rewards_N", found=f"not finite at {bad}",
                         rule="every reward is finite",
                         fix="score those documents, or leave them out")
    if rewards_N.numel() == 0:
        return rewards_N.clone()
    _, group, count = torch.unique(group_ids_N, return_inverse=True, return_counts=True)
    rewards = rewards_N.to(torch.float64)
    zero = torch.zeros(len(count), dtype=torch.float64, device=rewards.device)
    mean = zero.index_add(0, group, rewards) / count
    deviation = rewards - mean[group]
    # Deviations of equal rewards are rounding, which a small epsilon would blow up.
    spread = zero.scatter_reduce(0, group, rewards, "amax", include_self=False) \
        - zero.scatter_reduce(0, group, rewards, "amin", include_self=False)
    advantages = deviation
    if scale == "std":
        variance = zero.index_add(0, group, deviation.square()) / (count - ddof).clamp(min=1)
        advantages = deviation / (variance.sqrt() + epsilon)[group]
    silent = (spread == 0) | (count <= (ddof if scale == "std" else 1))
    return torch.where(silent[group], 0.0, advantages).to(rewards_N.dtype)
