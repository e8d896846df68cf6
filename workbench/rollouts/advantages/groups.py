"""Advantages of whole completions: each against the other completions of its prompt.

A document without a trained token is not part of the group: it enters no mean and no deviation and gets 0, unless
``trained_N`` is left out. Variances are means of squared deviations, never the difference of two large numbers.

Letters: N documents | K components of a reward.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.rollouts.places import places_of_each
from workbench.shapes import check_shapes

BASELINES = ("mean", "leave_one_out", "length_weighted")
SCALES = ("std", "leave_one_out_std", "batch_std", "none")


def group_advantages(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    *,
    baseline: Literal["mean", "leave_one_out", "length_weighted"] = "mean",
    scale: Literal["std", "leave_one_out_std", "batch_std", "none"] = "std",
    ddof: int = 1,
    epsilon: float = 1e-4,
    singleton: Literal["zero", "reward"] = "zero",
    trained_N: Tensor | None = None,
    lengths_N: Tensor | None = None,
) -> Tensor:
    """Difference of a reward from a baseline of its group, in deviations or in reward units.

    Exactly 0 in a group of equal rewards and, if the scale is a deviation, in a group (or, for "batch_std", a batch) of
    no more than ddof completions. The only completion of its prompt has no baseline: singleton "zero" gives it 0,
    "reward" its own reward (divided by 1 + epsilon unless the scale is "none"), as in verl's GRPO, RLOO and OPO.
    Groups are any labels, ``trained_N`` the documents with a trained token (None: all), ``lengths_N`` the trained
    tokens L of each document, for "length_weighted".

    Formula: ``(r_i - b_i) / (s_i + epsilon)``, or ``r_i - b_i`` for scale "none". Over the n completions of a group:
        b "mean":            mean of r
        b "leave_one_out":   mean of the other n - 1
        b "length_weighted": sum(L r) / sum(L)
        s "std":               sqrt(sum (r - mean)^2 / (n - ddof)), of the group, for any baseline
        s "leave_one_out_std": the same of the other n - 1 completions; where they are all equal, or no more than ddof,
                               the difference stays undivided, in reward units
        s "batch_std":         the same of all completions of the batch

    Shapes: [N] each -> [N], in the dtype of the rewards; computed in float64.
    Units:  deviations, or reward units for scale "none".
    Raises: ShapeError for shapes that disagree or a reward that is not finite; SpecError for a setting that is
        unknown, below 0 or missing.
    Source: mean and std: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1.2, which leaves ddof and epsilon open;
        trainers use ddof 1 (0 in a few) and epsilon 1e-4 or 1e-6. Mean and none: Dr. GRPO (arXiv 2503.20783).
        leave_one_out: RLOO (arXiv 2402.14740). leave_one_out with leave_one_out_std: NeMo-RL. length_weighted:
        OPO (arXiv 2505.23585).

    Example:
        >>> rewards_N, group_ids_N = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([7, 7, 3, 3])
        >>> group_advantages(rewards_N, group_ids_N, scale="none").tolist()
        [0.5, -0.5, 0.0, 0.0]
    """
    settings = (
        f"group_advantages(baseline={baseline!r}, scale={scale!r}, ddof={ddof}, epsilon={epsilon}, "
        f"singleton={singleton!r})"
    )
    known = baseline in BASELINES and scale in SCALES and singleton in ("zero", "reward")
    if not known or ddof < 0 or epsilon < 0:
        raise SpecError(
            settings,
            rule=f"baseline is one of {', '.join(BASELINES)}; scale is one of {', '.join(SCALES)}; singleton is zero "
            "or reward; ddof and epsilon are not negative",
            fix='baseline="mean" with scale="std" is GRPO, with scale="none" Dr. GRPO',
        )
    if (baseline == "length_weighted") != (lengths_N is not None):
        raise SpecError(
            settings,
            found=f"lengths_N is {'None' if lengths_N is None else 'given'}",
            rule="baseline length_weighted, and no other, weights completions by their trained tokens",
            fix="pass lengths_N with length_weighted, and leave it out otherwise",
        )
    check_shapes(
        "group_advantages", rewards_N=rewards_N, group_ids_N=group_ids_N, trained_N=trained_N, lengths_N=lengths_N
    )
    trained = torch.ones_like(rewards_N, dtype=torch.bool) if trained_N is None else trained_N
    _refuse_not_finite("group_advantages: rewards_N", rewards_N, trained)
    advantages = torch.zeros(rewards_N.shape, dtype=torch.float64, device=rewards_N.device)
    if trained.any():
        lengths = torch.ones_like(rewards_N) if lengths_N is None else lengths_N
        documents = rewards_N[trained].double(), group_ids_N[trained], lengths[trained].double()
        advantages[trained] = _of_trained(*documents, baseline, scale, ddof, epsilon, singleton)
    return advantages.to(rewards_N.dtype)


def group_baselines(
    rewards_N: Tensor, group_ids_N: Tensor, *, baseline: Literal["mean", "leave_one_out"] = "mean", ddof: int = 1
) -> tuple[Tensor, Tensor]:
    """The baseline of `group_advantages` for each reward, and the deviation of its scale.

    Formula: "mean": mean and standard deviation of the group; "leave_one_out": those of the others. The only completion
             of its prompt has itself as baseline; a deviation of equal rewards, or of no more than ddof, is 0.
    Shapes:  [N] each -> baseline_N, deviation_N, [N] float64.
    Units:   reward units.
    Raises:  SpecError: another baseline.
    """
    rewards_N = rewards_N.double()
    difference_N = group_advantages(rewards_N, group_ids_N, baseline=baseline, scale="none")
    _, group = torch.unique(group_ids_N, return_inverse=True)
    if baseline == "leave_one_out":
        return rewards_N - difference_N, _deviation_of_others(rewards_N, group, ddof)
    sizes = torch.bincount(group)
    squares = difference_N.new_zeros(len(sizes)).index_add(0, group, difference_N.square())
    deviation = (squares / (sizes - ddof).clamp(min=1)).sqrt()
    return rewards_N - difference_N, torch.where(sizes > ddof, deviation, 0.0)[group]


def rloo_advantages(rewards_N: Tensor, group_ids_N: Tensor, *, trained_N: Tensor | None = None) -> Tensor:
    """Reward minus the mean of the others, in reward units.

    Formula: ``r_i - mean of r_j over j != i`` = ``n / (n - 1) * (r_i - mean)``
    Shapes:  [N] each -> [N].
    Source:  RLOO, arXiv 2402.14740, equation 7.
    """
    return group_advantages(rewards_N, group_ids_N, baseline="leave_one_out", scale="none", trained_N=trained_N)


def opo_advantages(
    rewards_N: Tensor, group_ids_N: Tensor, lengths_N: Tensor, *, trained_N: Tensor | None = None
) -> Tensor:
    """Reward minus the length-weighted mean of its group, in reward units.

    If the squared norm of a completion's score function is proportional to its length, this baseline minimizes the
    variance of the gradient.

    Formula: ``r_i - sum(L r) / sum(L)``
    Shapes:  [N] each -> [N].
    Source:  OPO, arXiv 2505.23585, equation 5.
    """
    return group_advantages(
        rewards_N, group_ids_N, baseline="length_weighted", scale="none", trained_N=trained_N, lengths_N=lengths_N
    )


def gpg_advantages(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    *,
    divisor: float = 1.0,
    informative: Literal["unequal_groups", "rewards_not_zero"] = "unequal_groups",
    singleton: Literal["zero", "reward"] = "zero",
    trained_N: Tensor | None = None,
) -> Tensor:
    """Centred reward, scaled up to make up for groups of equal rewards, which have no gradient.

    Formula: ``alpha * (r_i - mean) / divisor``, alpha = completions of the step / completions in groups of unequal
             rewards, or / completions whose reward is not 0.
    Shapes:  [N] each -> [N]. Units: reward units.
    Source:  GPG, arXiv 2504.02546, whose F_norm is the divisor. verl counts rewards that are not 0.
    """
    centred_N = group_advantages(
        rewards_N, group_ids_N, scale="none", singleton=singleton, trained_N=trained_N
    ).double()
    trained = torch.ones_like(rewards_N, dtype=torch.bool) if trained_N is None else trained_N
    if informative == "rewards_not_zero":
        informative_N = (rewards_N != 0) & trained
    else:
        # A completion at its group's mean is 0 as well, and counts.
        _, group = torch.unique(group_ids_N, return_inverse=True)
        informative_N = torch.isin(group, group[centred_N != 0]) & trained
    return (centred_N * trained.sum() / informative_N.sum().clamp(min=1) / divisor).to(rewards_N.dtype)


def pass_at_k_advantages(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    *,
    scale: Literal["std", "none"] = "std",
    epsilon: float = 1e-6,
    trained_N: Tensor | None = None,
) -> Tensor:
    """Margin of the best completion of a group over the second best; 0 for all others.

    Formula: ``(r_1 - r_2) / (s + epsilon)`` on the best completion, s the deviation (n - 1) of the group; undivided for
             scale "none". 0 if two are best.
    Shapes:  [N] each -> [N].
    Units:   deviations, or reward units for scale "none".
    Raises:  SpecError: a group of one completion; another scale.
    Source:  arXiv 2503.19595, as verl's grpo_passk computes it.
    """
    check_shapes("pass_at_k_advantages", rewards_N=rewards_N, group_ids_N=group_ids_N, trained_N=trained_N)
    refuse_other("pass_at_k_advantages", "scale", scale, ("std", "none"))
    trained = torch.ones_like(rewards_N, dtype=torch.bool) if trained_N is None else trained_N
    _refuse_not_finite("pass_at_k_advantages: rewards_N", rewards_N, trained)
    advantages = torch.zeros(rewards_N.shape, dtype=torch.float64, device=rewards_N.device)
    for group, of_group in places_of_each(group_ids_N).items():
        members = of_group[trained[of_group]]
        if not len(members):
            continue
        if len(members) < 2:
            raise SpecError(
                f"the second best completion of group {group}",
                found="one completion",
                rule="the best completion is compared with the second best",
                fix="sample two completions per prompt",
            )
        rewards = rewards_N[members].double()
        (best, second), order = rewards.sort(descending=True).values[:2], rewards.argmax()
        if best > second:
            divisor = 1.0 if scale == "none" else rewards.std() + epsilon
            advantages[members[order]] = (best - second) / divisor
    return advantages.to(rewards_N.dtype)


def gdpo_advantages(
    rewards_NK: Tensor,
    group_ids_N: Tensor,
    weights_K: Tensor,
    *,
    ddof: int = 1,
    epsilon: float = 1e-4,
    unscored: Literal["refuse", "skip"] = "refuse",
    trained_N: Tensor | None = None,
) -> Tensor:
    """Normalise each component of a reward in its group separately, add them, then normalise over the batch.

    Adding first and normalising afterwards can give completions with different components the same advantage.

    Formula: ``z_i = sum_k w_k (r_ik - mean_k) / (std_k + epsilon)`` in the group;
             ``(z_i - mean z) / (std z + epsilon)`` over the batch; exactly 0 where all z are equal.
             unscored "skip": a component that is NaN was not scored and enters none of these; a completion without
             a score gets 0, and the others are the batch.
    Shapes:  rewards_NK [N, K], group_ids_N [N], weights_K [K] -> [N].
    Units:   deviations.
    Raises:  ShapeError: shapes that disagree, or a reward that is not finite.
    Source:  GDPO, arXiv 2601.05242, equations 4 to 6; ddof, epsilon and "skip" as in TRL.
    """
    check_shapes(
        "gdpo_advantages", rewards_NK=rewards_NK, group_ids_N=group_ids_N, weights_K=weights_K, trained_N=trained_N
    )
    trained = torch.ones_like(group_ids_N, dtype=torch.bool) if trained_N is None else trained_N
    scored_NK = trained[:, None].expand(rewards_NK.shape)
    if unscored == "skip":
        scored_NK = scored_NK & ~rewards_NK.isnan()
    parts = [
        float(weight)
        * group_advantages(rewards_N.double(), group_ids_N, ddof=ddof, epsilon=epsilon, trained_N=scored_N)
        for rewards_N, scored_N, weight in zip(rewards_NK.unbind(1), scored_NK.unbind(1), weights_K, strict=True)
    ]
    total_N = torch.stack(parts).sum(0)
    one_batch_N = torch.zeros_like(group_ids_N)
    return group_advantages(total_N, one_batch_N, ddof=ddof, epsilon=epsilon, trained_N=scored_NK.any(1)).to(
        rewards_NK.dtype
    )


def combine_components(rewards_NK: Tensor, weights_K: Tensor) -> tuple[Tensor, Tensor]:
    """Combine components, of which some were not scored (NaN), to one reward per completion.

    Formula: ``r_i = sum over scored k of w_k r_ik``; 0 where nothing was scored.
    Shapes:  rewards_NK [N, K], weights_K [K] -> rewards_N [N], scored_N [N] bool: at least one was scored.
    Units:   reward units.
    Source:  huggingface/trl, where a reward function may return None.
    """
    check_shapes("combine_components", rewards_NK=rewards_NK, weights_K=weights_K)
    scored_NK = ~rewards_NK.isnan()
    return (torch.where(scored_NK, rewards_NK, 0.0) * weights_K).sum(1), scored_NK.any(1)


def _of_trained(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    baseline: str,
    scale: str,
    ddof: int,
    epsilon: float,
    singleton: str,
) -> Tensor:
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    zero = torch.zeros(len(count), dtype=torch.float64, device=rewards.device)

    def by_group(values: Tensor) -> Tensor:
        return zero.index_add(0, group, values)

    spread = zero.scatter_reduce(0, group, rewards, "amax", include_self=False) - zero.scatter_reduce(
        0, group, rewards, "amin", include_self=False
    )
    mean = by_group(rewards) / count
    deviation = difference = rewards - mean[group]
    size = count[group]
    if baseline == "length_weighted":
        # About the mean, to avoid cancellation of large numbers; a completion of length 0 has weight 0.
        difference = deviation - (by_group(lengths * deviation) / by_group(lengths).clamp(min=1))[group]
    elif baseline == "leave_one_out":
        difference = deviation * size / (size - 1).clamp(min=1)
    # Deviations of equal rewards are rounding errors, which a small epsilon would amplify.
    silent = (spread == 0)[group]
    advantages = difference
    if scale == "std":
        advantages = difference / ((by_group(deviation.square()) / (count - ddof).clamp(min=1)).sqrt() + epsilon)[group]
        silent |= size <= ddof
    elif scale == "batch_std":
        total = rewards - rewards.mean()
        variance = total.square().sum() / max(1, len(rewards) - ddof)
        advantages = difference / (variance.sqrt() + epsilon)
        silent |= len(rewards) <= ddof
    elif scale == "leave_one_out_std":
        others = _deviation_of_others(rewards, group, ddof)
        advantages = torch.where(others > 0, difference / (others + epsilon), difference)
    advantages = torch.where(silent, 0.0, advantages)
    alone = rewards if scale == "none" else rewards / (1 + epsilon)
    return torch.where(size == 1, alone if singleton == "reward" else 0.0, advantages)


def _deviation_of_others(rewards: Tensor, group: Tensor, ddof: int) -> Tensor:
    """Standard deviation of the other completions of the group; exactly 0 if they are equal, or no more than ddof."""
    deviations = torch.zeros_like(rewards)
    for members in places_of_each(group).values():
        size = len(members)
        if size - 1 <= max(ddof, 1):
            continue
        others = rewards[members].expand(size, size)[~torch.eye(size, dtype=torch.bool, device=rewards.device)]
        others = others.view(size, size - 1)
        variance = (others - others.mean(1, keepdim=True)).square().sum(1) / (size - 1 - ddof)
        deviations[members] = torch.where(others.amax(1) == others.amin(1), 0.0, variance.sqrt())
    return deviations


def refuse_other(where: str, setting: str, value: str, known: tuple[str, str]) -> None:
    """Raise SpecError if a setting has neither of its two values."""
    if value not in known:
        raise SpecError(
            f"{where}({setting}={value!r})", rule=f"{setting} is {' or '.join(known)}", fix="correct the call"
        )


def _refuse_not_finite(what: str, values: Tensor, where: Tensor) -> None:
    if bad := torch.nonzero(~torch.isfinite(values) & where).squeeze(1).tolist():
        raise ShapeError(
            what,
            found=f"not finite at {bad}",
            rule="every reward is finite",
            fix="score those documents, or leave them out",
        )
