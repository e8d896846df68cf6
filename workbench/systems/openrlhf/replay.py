"""Replays of OpenRLHF/OpenRLHF's functions from their arrays.

Letters: T packed tokens | P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.losses.preference import implied_rewards, mean_over_pairs, pair_losses
from workbench.losses.value import value_loss
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import step_weights
from workbench.rollouts.advantages.tokens import token_rewards
from workbench.rollouts.rewards import bounded, kl_penalties
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case
from workbench.systems.empty_batch import (
    clipped_mean_gradient,
    log_ratio,
    sequence_mean_gradient,
    undefined,
    value_mean_gradient,
)
from workbench.systems.openrlhf import metrics as named
from workbench.systems.openrlhf.settings import (
    LOG_CLAMP,
    AggregateSettings,
    DPOSettings,
    KLSettings,
    RewardSettings,
    ValueSettings,
)
from workbench.systems.openrlhf.translate import SCALING, counts, is_by_token
from workbench.systems.registry import parse_settings
from workbench.systems.replays import Replayed


def undefined_loss(replayed: Replayed) -> dict[str, Tensor]:
    """Return NaN if `masked_mean` divides by 0: nothing counts here, and no count of the whole batch was given.

    The gradient is NaN, too, except for tokens that the clip cuts, which have none.
    """
    if not _is_undefined(replayed.case, replayed.settings):
        return {}
    settings, case = replayed.settings, replayed.case
    policy_T, advantages_T = case["logprobs"].reshape(-1), case.spread("advantages").reshape(-1)
    if settings.policy_loss_type == "gspo":
        gradient_T = sequence_mean_gradient(advantages_T, case.document_ids_T, settings.clip_eps_low)
    else:
        gradient_T = clipped_mean_gradient(
            log_ratio(policy_T, case["old_logprobs"].reshape(-1)),
            advantages_T,
            clip_low=settings.clip_eps_low,
            clip_high=settings.clip_eps_high,
            dual_clip=settings.dual_clip,
            log_clamp=LOG_CLAMP,
        )
    return {"loss": undefined(), "grad_logprobs": gradient_T}


def _is_undefined(case: Case, settings: AggregateSettings) -> bool:
    """True if a mean is taken over nothing."""
    count = settings.batch_num_tokens if is_by_token(settings) else settings.global_batch_size
    return count is None and not case.loss_mask_T.any()


def value(case: Case) -> dict[str, Any]:
    """Replay `ValueLoss`: the critic's error."""
    settings = parse_settings(ValueSettings, case.config, where=case.system)
    leaf = case["values"].clone().requires_grad_()
    old_T = None if settings.clip_eps is None else case["old_values"].reshape(-1)
    term = value_loss(
        leaf.reshape(-1), case["returns"].reshape(-1), case.loss_mask_T, old_values_T=old_T, clip=settings.clip_eps
    )
    spec = LossSpec(denominator="token" if settings.token_level_loss else "document", scaling=SCALING)
    (weights,), _ = step_weights([case.row()], spec, given=counts(settings))
    total = reduce_terms({"value": term}, weights, case.loss_mask_T)["total"].value
    total.backward()
    outputs = {"loss": total.detach(), "grad_values": leaf.grad, "metrics": {}}
    if _is_undefined(case, settings):
        gradient_T = value_mean_gradient(leaf.reshape(-1), case["returns"].reshape(-1), old_T, settings.clip_eps)
        return outputs | {"loss": undefined(), "grad_values": case.shaped(gradient_T)}
    return outputs


def dpo(case: Case) -> dict[str, Any]:
    """Replay `DPOLoss` from sums of log-probabilities."""
    settings = parse_settings(DPOSettings, case.config, where=case.system)
    leaf = torch.stack([case["chosen_logprob_sums"], case["rejected_logprob_sums"]]).requires_grad_()
    ref = torch.stack([case["ref_chosen_logprob_sums"], case["ref_rejected_logprob_sums"]])
    chosen_P, rejected_P = implied_rewards(leaf, ref)
    options: Mapping[str, Any] = {"kind": "ipo"} if settings.ipo else {"label_smoothing": settings.label_smoothing}
    total = mean_over_pairs(pair_losses(chosen_P, rejected_P, beta=settings.beta, **options))
    total.backward()
    return {
        "loss": total.detach(),
        "grad_chosen_rejected": leaf.grad,
        "metrics": named.of_pairs(chosen_P, rejected_P, settings.beta),
    }


def kl_spec(case: Case) -> LossSpec:
    """Return the spec of `compute_approx_kl`."""
    settings = parse_settings(KLSettings, case.config, where=case.system)
    return LossSpec(kl={"coefficient": 1.0, "estimator": settings.kl_estimator, "output_clamp": settings.output_clamp})


def reward(case: Case) -> dict[str, Any]:
    """Replay `compute_reward`: the row's reward on its last token, less the KL of every token."""
    settings = parse_settings(RewardSettings, case.config, where=case.system)
    rewards_N = (
        case["rewards"] if settings.reward_clip_range is None else bounded(case["rewards"], *settings.reward_clip_range)
    )
    penalties_T = kl_penalties(case["kl"].reshape(-1), max(settings.kl_coef, 0.0))
    rewards_T = token_rewards(rewards_N, case.document_ids_T, case.loss_mask_T, penalties_T, elsewhere="as_given")
    return {"token_rewards": case.shaped(rewards_T)}
