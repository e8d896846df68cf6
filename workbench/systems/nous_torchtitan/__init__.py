"""The GRPO step of NousResearch/torchtitan: rows of tokens from logits, a matrix of losses, two ways to reduce it.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.losses.build import build_loss, surrogate_ratio
from workbench.losses.document_sums import DocumentSums, document_totals, mean_of_document_means
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.reduction.evaluate import token_values
from workbench.rollouts.advantages.groups import group_advantages
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case
from workbench.systems.nous_torchtitan import metrics as named
from workbench.systems.nous_torchtitan.metrics import Step, mean_logit, step_metrics
from workbench.systems.nous_torchtitan.settings import ESTIMATORS, MaskedSettings, NousSettings, RewardNormSettings
from workbench.systems.nous_torchtitan.translate import CONTRACTS, back, translate
from workbench.systems.registry import LOGPROBS, System
from workbench.systems.replays import Replayed, aggregation, evaluate_case, finish

UNSAMPLED = 1.0
"""Placeholder log-probability, above that of any token: its position was not sampled."""


def policy_loss_logits(case: Case) -> dict[str, Any]:
    """Replay the step: the loss, and the matrix of per-token losses, also where nothing trains."""
    leaf = case.leaf("logits")
    logits_TV = leaf.reshape(-1, leaf.shape[-1])
    further = ("entropy", "logsumexp", "mean_squared_logit")
    head_output = token_logprobs_from_logits(logits_TV, case.targets_T, outputs=further)
    replayed = evaluate_case(case, head_output)
    outputs = finish(replayed, {"grad_logits": leaf})
    step = evaluate_all_positions(replayed, mean_logit(logits_TV))
    return {
        **outputs,
        "per_token_loss": case.shaped(token_values(step.terms)),
        "logprobs": case.shaped(head_output.logprobs_T),
        "metrics": step_metrics(step),
    }


def evaluate_all_positions(replayed: Replayed, mean_logit_T: torch.Tensor) -> Step:
    """Evaluate the loss on every position, with sums of rows over those that train."""
    case, row, spec, settings = replayed.case, replayed.row, replayed.translation.spec, replayed.settings
    live = replayed.head_output.map(torch.Tensor.detach)
    live_T, old_T = live.logprobs_T, case.everywhere("old_logprobs")
    sampler_T = drawn_T = case.everywhere("rollout_logprobs")
    if sampler_T is not None:
        drawn_T = torch.where(row.loss_mask_T, sampler_T, torch.full_like(sampler_T, UNSAMPLED))
    inputs = LossInputs(
        live_T,
        live_T if old_T is None else old_T,
        case.spread("advantages").reshape(-1),
        drawn_T,
        case.everywhere("ref_logprobs") if settings.use_ref_model else None,
        live.entropy_T,
        loss_mask_T=torch.ones_like(row.loss_mask_T),
        document_ids_T=row.document_ids_T,
        lengths_T=row.lengths_T,
        logsumexp_T=live.logsumexp_T,
        mean_squared_logit_T=live.mean_squared_logit_T,
        sums=DocumentSums(row.document_ids_T, row.loss_mask_T),
    )
    return Step(
        spec,
        inputs,
        build_loss(spec)(inputs),
        surrogate_ratio(inputs, spec),
        row.loss_mask_T,
        row.document_ids_T,
        sampler_T,
        mean_logit_T,
        ESTIMATORS[settings.kl_estimator_type],
        old_T is None,
        settings.logprob_floor,
    )


def masked(case: Case) -> dict[str, Any]:
    """Replay sums and means of values under a mask; a mean over rows is undefined if a row has none."""
    summed = "sum" in case.function
    if not case.options(MaskedSettings).per_seq:
        outputs = aggregation(case, LossSpec(denominator="raw" if summed else "token"))
        return {"result": outputs.pop("loss"), **outputs}
    leaf = case.leaf("values")
    make = document_totals if summed else mean_of_document_means
    result = make(leaf.reshape(-1), case.loss_mask_T, case.document_ids_T, case.shape[0])
    cotangent = case.get("cotangent")
    result.backward(torch.ones_like(result) if cotangent is None else cotangent)
    return {"result": result.detach(), "grad_values": leaf.grad}


def reward_norm(case: Case) -> dict[str, Any]:
    """Replay rewards against the mean of their group, in standard deviations of it."""
    settings = case.options(RewardNormSettings)
    return {"advantages": group_advantages(case["rewards"], case["group_ids"], ddof=1, epsilon=settings.eps)}


SYSTEM = System(
    name="nous_torchtitan",
    title="the torchtitan fork of Nous Research",
    version="94d6abd4",
    settings=NousSettings,
    translate=translate,
    back=back,
    scaling=CONTRACTS,
    replays={"policy_loss_logits": policy_loss_logits, "aggregation": masked, "advantage": reward_norm},
    arrays=LOGPROBS,
    arrays_of={"aggregation": ("values", "mask", "cotangent"), "advantage": ("rewards", "group_ids")},
    aliases=named.names,
    left_out=named.LEFT_OUT,
)
