"""Advantages of tokens against a baseline without a critic: a greedy completion's reward, or the group's at that token.

Letters: T packed tokens | N documents | K steps.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workbench.rollouts.advantages.groups import refuse_other
from workbench.rollouts.places import places_of_each
from workbench.shapes import check_shapes


def rewards_to_go(
    token_rewards_T: Tensor,
    document_ids_T: Tensor,
    loss_mask_T: Tensor,
    *,
    elsewhere: Literal["zero", "carry"] = "zero",
) -> Tensor:
    """Reward-to-go of each token.

    Formula: ``G_t = sum of reward_t' over trained t' >= t of the document``, on trained tokens; with carry also on the
             others of the document (a tool's output).
    Shapes:  [T] each -> [T] float64; 0 elsewhere.
    Raises:  SpecError: another value of elsewhere.
    Source:  carry: verl, whose sums from the end backwards run over a whole row.
    """
    refuse_other("rewards_to_go", "elsewhere", elsewhere, ("zero", "carry"))
    check_shapes(
        "rewards_to_go", token_rewards_T=token_rewards_T, document_ids_T=document_ids_T, loss_mask_T=loss_mask_T
    )
    earned_T = torch.where(loss_mask_T, token_rewards_T.double(), 0.0)
    to_go_T = torch.zeros_like(earned_T)
    for at in places_of_each(document_ids_T).values():
        to_go_T[at] = earned_T[at].flip(0).cumsum(0).flip(0)
    return torch.where(document_ids_T >= 0 if elsewhere == "carry" else loss_mask_T, to_go_T, 0.0)


def remax_advantages(
    token_rewards_T: Tensor,
    baselines_N: Tensor,
    document_ids_T: Tensor,
    loss_mask_T: Tensor,
    *,
    elsewhere: Literal["zero", "carry"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward-to-go minus the reward of the greedy completion of the same prompt.

    Formula: ``A_t = G_t - b`` on trained tokens, G_t elsewhere; G: `rewards_to_go`, b of the document
    Shapes:  baselines_N [N], the others [T] -> advantages_T [T], returns_T = G [T], float64.
    Units:   reward units.
    Source:  ReMax, arXiv 2310.10505; per token: verl.
    """
    to_go_T = rewards_to_go(token_rewards_T, document_ids_T, loss_mask_T, elsewhere=elsewhere)
    baseline_T = torch.where(loss_mask_T, baselines_N.double()[document_ids_T.clamp_min(0)], 0.0)
    return to_go_T - baseline_T, to_go_T


def optimal_token_baseline(
    token_rewards_T: Tensor,
    old_logprobs_T: Tensor,
    squared_probabilities_T: Tensor,
    document_ids_T: Tensor,
    loss_mask_T: Tensor,
    group_ids_N: Tensor,
    *,
    weights_T: Tensor | None = None,
    aligned: Literal["position", "trained"] = "position",
    zero_tail: bool = True,
    epsilon: float = 1e-8,
    elsewhere: Literal["zero", "carry"] = "zero",
) -> tuple[Tensor, Tensor]:
    """Reward-to-go minus the baseline that minimizes the variance of the gradient at this step of the group.

    A token's score function has the squared norm 1 - 2 p + sum of squared probabilities of the vocabulary, in logits;
    its sum over the document up to here, W, is the weight of the document's return in the baseline. A step is a
    position in the document or, for aligned "trained" (several turns), its n-th trained token.

    Formula: over the documents of the group that train at step k:
             ``b_k = sum(G_k W_k) / (sum(W_k) + epsilon)``,  ``A_t = G_t - b_k`` on trained tokens, 0 elsewhere
             W_k = sum over trained steps up to k of w^2 (1 - 2 p + sum p_v^2), w a sampler correction (``weights_T``)
             or 1, p of ``old_logprobs_T``
             b is 0 in a group of one and, with a zero tail, for the one longest document beyond the length of the
             second longest.

    Shapes: [T] and [N] -> advantages_T, returns_T = G, [T] float64.
    Raises: SpecError: another alignment.
    Source: the optimal token baseline of verl 1dda039b; "trained" is its tir_optimal_token_baseline.
    """
    check_shapes(
        "optimal_token_baseline",
        token_rewards_T=token_rewards_T,
        old_logprobs_T=old_logprobs_T,
        squared_probabilities_T=squared_probabilities_T,
        document_ids_T=document_ids_T,
        loss_mask_T=loss_mask_T,
        weights_T=weights_T,
    )
    refuse_other("optimal_token_baseline", "aligned", aligned, ("position", "trained"))
    to_go_T = rewards_to_go(token_rewards_T, document_ids_T, loss_mask_T, elsewhere=elsewhere)
    norm_T = 1 - 2 * old_logprobs_T.double().exp() + squared_probabilities_T.double()
    if weights_T is not None:
        norm_T = norm_T * weights_T.double().square()
    places, none = places_of_each(document_ids_T), document_ids_T.new_empty(0)
    indices = [places.get(document, none) for document in range(len(group_ids_N))]
    steps = max((len(at) for at in indices), default=0)
    returns_NK, energy_NK = to_go_T.new_zeros(2, len(indices), steps)
    present_NK = torch.zeros(len(indices), steps, dtype=torch.bool, device=to_go_T.device)
    step_T = torch.zeros_like(document_ids_T)
    for document, at in enumerate(indices):
        counts = loss_mask_T[at]
        step_T[at] = counts.long().cumsum(0) - 1 if aligned == "trained" else torch.arange(len(at), device=at.device)
        trained = at[counts]
        energy_NK[document, step_T[trained]] = norm_T[trained].cumsum(0)
        returns_NK[document, step_T[trained]] = to_go_T[trained]
        present_NK[document, step_T[trained]] = True
    baseline_NK = _baselines(returns_NK, energy_NK, present_NK, group_ids_N, aligned == "trained", zero_tail, epsilon)
    advantages_T = to_go_T - baseline_NK[document_ids_T.clamp_min(0), step_T.clamp_min(0)]
    return torch.where(loss_mask_T, advantages_T, 0.0), to_go_T


def _baselines(
    returns_NK: Tensor,
    energy_NK: Tensor,
    present_NK: Tensor,
    group_ids_N: Tensor,
    trained_only: bool,
    zero_tail: bool,
    epsilon: float,
) -> Tensor:
    """[N, K] the group's baseline at each step, 0 where a document has none."""
    lengths_N = present_NK.sum(1)
    baseline_NK = torch.zeros_like(returns_NK)
    for of_group in places_of_each(group_ids_N).values():
        members = of_group[lengths_N[of_group] > 0] if trained_only else of_group
        if len(members) < 2:
            continue
        energy = energy_NK[members]
        baseline_NK[members] = (returns_NK[members] * energy).sum(0) / (energy.sum(0) + epsilon)
        second, longest = lengths_N[members].sort().values[-2:].tolist()
        if zero_tail and longest > second:
            baseline_NK[members[lengths_N[members].argmax()], second:] = 0.0
    return baseline_NK
