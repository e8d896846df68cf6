"""ServiceNow/PipelineRL: one step on packed documents, divided by a configured number of them.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.losses.build import surrogate_ratio
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.rollouts.advantages.groups import group_advantages
from workbench.systems.case import Case
from workbench.systems.metrics import PeerSettings, settings_of
from workbench.systems.pipelinerl import metrics as named
from workbench.systems.pipelinerl.dump import estimator_of, read_dump
from workbench.systems.pipelinerl.metrics import clipped_documents, token_weight_numbers
from workbench.systems.pipelinerl.settings import AdvantageSettings, PipelineRLSettings
from workbench.systems.pipelinerl.translate import CONTRACTS, back, counts, translate
from workbench.systems.registry import System
from workbench.systems.replays import Replayed, evaluate_case, finish, policy_settings


def policy_loss_logits(case: Case) -> dict[str, Any]:
    """Replay one `rl_step` on logits."""
    settings, leaf = policy_settings(case), case.leaf("logits")
    head_output = token_logprobs_from_logits(case.counted(leaf), case.targets_T, temperature=settings.temperature)
    overflow_T, group_tokens_T = case.everywhere("overflow"), case.everywhere("group_tokens")
    extensions = {"truncated": torch.zeros_like(case.targets_T) if overflow_T is None else overflow_T}
    if group_tokens_T is not None:
        extensions["group_tokens"] = group_tokens_T
    outputs = finish(evaluate_case(case, head_output, extensions=extensions), {"grad_logits": leaf})
    if not case.loss_mask_T.any():  # PipelineRL then reports nothing else
        outputs["metrics"] = {"input_size": outputs["metrics"]["input_size"]}
    return outputs


def peer_settings(replayed: Replayed) -> PeerSettings:
    """Return the settings of metrics: sums over documents. The KL is measured even if it is not in the loss."""
    spec = replayed.translation.spec
    measured = spec.kl.model_copy(update={"input_clamp": replayed.settings.clamp_log_ratio_ref_new_value})
    return settings_of(spec, replayed.slots)._replace(num_documents=1, spec=spec.model_copy(update={"kl": measured}))


def further_metrics(replayed: Replayed) -> dict[str, float]:
    """Return the loss, weights, coefficients and sizes."""
    settings, case = replayed.settings, replayed.case
    loss = float(replayed.total.detach())
    rows, length = torch.Size([1, *case.shape])[-2:]
    weights_T, clip = replayed.weights["policy"].loss_T, peer_settings(replayed).clip
    documents, clipped = replayed.slots.number, {}
    if settings.policy_loss == "gspo":
        assert clip is not None, "gspo has a clip"
        ratio_T = surrogate_ratio(replayed.inputs, replayed.translation.spec)
        clipped["clamp_log_ratio_new_old_indicator"] = clipped_documents(ratio_T, replayed.inputs, weights_T, clip)
    return {
        "loss": loss,
        "max_loss": loss,
        "min_loss": loss,
        **token_weight_numbers(replayed.inputs, weights_T),
        **clipped,
        "kl_coef": documents * settings.kl_now,
        "entropy_bonus_coef": documents * settings.entropy_now,
        "input_size": float(rows * (length + 1)),
    }


def advantage(case: Case) -> dict[str, Any]:
    """Replay advantages: leave-one-out means, divided by the deviation of the whole group."""
    settings = case.options(AdvantageSettings)
    advantages_N = group_advantages(
        case["rewards"],
        case["group_ids"],
        baseline="leave_one_out",
        ddof=1,
        epsilon=settings.eps,
        scale="std" if settings.divide_advantage_by_std else "none",
    )
    return {"advantages": advantages_N}


SYSTEM = System(
    name="pipelinerl",
    title="PipelineRL",
    version="58d39345",
    settings=PipelineRLSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    temperature=lambda settings: settings.temperature,
    peer_settings=peer_settings,
    metrics=further_metrics,
    replays={"policy_loss_logits": policy_loss_logits, "advantage": advantage},
    arrays=(
        "old_logprobs",
        "ref_logprobs",
        "rewards",
        "group_tokens",
        "label_counts",
        "num_labels",
        "overflow",
        "token_ids",
    ),
    arrays_of={"advantage": ("rewards", "group_ids")},
    aliases=named.names,
    left_out=named.LEFT_OUT,
    estimator=estimator_of,
    read_dump=read_dump,
)
