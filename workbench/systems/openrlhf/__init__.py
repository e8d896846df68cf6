"""OpenRLHF/OpenRLHF: clipped policy losses, a critic's loss, DPO, KL estimates and rewards of tokens.

Letters: T packed tokens | P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.losses.preference import implied_rewards, mean_over_pairs, pair_losses
from workbench.rollouts.advantages.inputs import bounded, kl_penalties
from workbench.rollouts.advantages.tokens import token_rewards
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case
from workbench.systems.empty_batch import clipped_mean_gradient, sequence_mean_gradient, undefined, value_mean_gradient
from workbench.systems.openrlhf import metrics as named
from workbench.systems.openrlhf.advantages import estimator_of
from workbench.systems.openrlhf.dump import read_dump
from workbench.systems.openrlhf.settings import (
    LOG_CLAMP,
    AggregateSettings,
    DPOSettings,
    KLSettings,
    PolicySettings,
    RewardSettings,
    ValueSettings,
)
from workbench.systems.openrlhf.translate import CONTRACTS, SCALING, back, counts, is_by_token, translate
from workbench.systems.registry import ESTIMATOR, VALUES, System
from workbench.systems.replays import Replayed, back_propagate, critic_loss, kl_estimator


def undefined_loss(replayed: Replayed) -> dict[str, Tensor]:
    """Return NaN if `masked_mean` divides by 0: nothing counts here, and no count of the whole batch was given.

    The gradient is NaN, too, except for tokens that the clip cuts, which have none.
    """
    settings, case = replayed.settings, replayed.case
    if not _is_undefined(case, settings):
        return {}
    advantages_T = case.spread("advantages").reshape(-1)
    if settings.policy_loss_type == "gspo":
        gradient_T = sequence_mean_gradient(advantages_T, case.document_ids_T, settings.clip_eps_low)
    else:
        gradient_T = clipped_mean_gradient(
            case["logprobs"].reshape(-1),
            case["old_logprobs"].reshape(-1),
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
    settings = case.options(ValueSettings)
    spec = LossSpec(denominator="token" if settings.token_level_loss else "document", compat={"scaling": SCALING})
    outputs, _ = critic_loss(case, spec, counts(settings), clip=settings.clip_eps)
    if not _is_undefined(case, settings):
        return outputs
    old_T = None if settings.clip_eps is None else case["old_values"].reshape(-1)
    values_T, returns_T = case["values"].reshape(-1), case["returns"].reshape(-1)
    gradient_T = value_mean_gradient(values_T, returns_T, old_T, settings.clip_eps)
    return outputs | {"loss": undefined(), "grad_values": case.shaped(gradient_T)}


def dpo(case: Case) -> dict[str, Any]:
    """Replay `DPOLoss` from sums of log-probabilities."""
    settings = case.options(DPOSettings)
    leaf = torch.stack([case["chosen_logprob_sums"], case["rejected_logprob_sums"]]).requires_grad_()
    ref = torch.stack([case["ref_chosen_logprob_sums"], case["ref_rejected_logprob_sums"]])
    chosen_P, rejected_P = implied_rewards(leaf, ref)
    options: Mapping[str, Any] = {"kind": "ipo"} if settings.ipo else {"label_smoothing": settings.label_smoothing}
    total = mean_over_pairs(pair_losses(chosen_P, rejected_P, beta=settings.beta, **options))
    metrics = named.of_pairs(chosen_P, rejected_P, settings.beta)
    return {**back_propagate(total, {"grad_chosen_rejected": leaf}), "metrics": metrics}


def kl(case: Case) -> dict[str, Any]:
    """Replay `compute_approx_kl`."""
    settings = case.options(KLSettings)
    gradient = "straight_through" if settings.unbiased_gradient else "path"
    penalty = {
        "coefficient": 1.0,
        "estimator": settings.kl_estimator,
        "output_clamp": settings.output_clamp,
        "gradient": gradient,
    }
    return kl_estimator(case, LossSpec(kl=penalty))


def reward(case: Case) -> dict[str, Any]:
    """Replay `compute_reward`: the row's reward on its last token, less the KL of every token."""
    settings, rewards_N = case.options(RewardSettings), case["rewards"]
    if settings.reward_clip_range is not None:
        rewards_N = bounded(rewards_N, *settings.reward_clip_range)
    penalties_T = kl_penalties(case["kl"].reshape(-1), max(settings.kl_coef, 0.0))
    rewards_T = token_rewards(rewards_N, case.document_ids_T, case.loss_mask_T, penalties_T, elsewhere="as_given")
    return {"token_rewards": case.shaped(rewards_T)}


SYSTEM = System(
    name="openrlhf",
    title="OpenRLHF",
    version="0.11.2",
    settings=PolicySettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    outputs=undefined_loss,
    replays={"value_loss": value, "dpo_from_sums": dpo, "kl_estimator": kl, "reward_shaping": reward},
    arrays=("old_logprobs", "rollout_logprobs"),
    arrays_of={
        "value_loss": VALUES,
        "dpo_from_sums": (
            "chosen_logprob_sums",
            "rejected_logprob_sums",
            "ref_chosen_logprob_sums",
            "ref_rejected_logprob_sums",
        ),
        "kl_estimator": ESTIMATOR,
        "reward_shaping": ("rewards", "kl", "mask"),
    },
    unsupported_arrays={
        "ref_logprobs": "OpenRLHF's PolicyLoss has no KL term; replay the KL as the kind kl_estimator",
        "entropies": "OpenRLHF's PolicyLoss has no entropy bonus",
    },
    aliases=named.names,
    estimator=estimator_of,
    read_dump=read_dump,
)
