"""The GRPO step of NousResearch/torchtitan: rows of tokens from logits, a matrix of losses, two ways to reduce it.

Letters: T packed tokens | V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.losses.build import build_loss, surrogate_ratio
from workbench.losses.document_sums import DocumentSums, document_totals, mean_of_document_means
from workbench.losses.terms import LossInputs
from workbench.policy.logprobs import TokenLogprobs
from workbench.policy.logprobs.reference import token_logprobs_from_logits
from workbench.reduction.evaluate import token_values
from workbench.rollouts.advantages.groups import group_advantages
from workbench.specs.losses import LossSpec
from workbench.systems.case import Case
from workbench.systems.nous_torchtitan import metrics as named
from workbench.systems.nous_torchtitan.metrics import Step, mean_logit, step_metrics
from workbench.systems.nous_torchtitan.settings import ESTIMATORS, MaskedSettings, NousSettings, RewardNormSettings
from workbench.systems.nous_torchtitan.translate import CONTRACTS, back, translate
from workbench.systems.registry import LOGPROBS, System, parse_settings
from workbench.systems.replays import Replayed, aggregation, evaluate_case, finish

UNSAMPLED = 1.0
"""Placeholder log-probability, above that of any token: its position was not sampled."""


def policy_loss_logits(case: Case) -> dict[str, Any]:
    """Replay the step: the loss, and the matrix of per-token losses, also where nothing trains."""
    leaf = case["logits"].clone().requires_grad_()
    logits_TV = leaf.reshape(-1, leaf.shape[-1])
    head_output = token_logprobs_from_logits(
        logits_TV, case["targets"].reshape(-1).clamp_min(0), outputs=("entropy", "logsumexp", "mean_squared_logit")
    )
    replayed = evaluate_case(case, head_output)
    outputs = finish(replayed, {"grad_logits": leaf})
    step = evaluate_all_positions(replayed, head_output, mean_logit(logits_TV))
    return {
        **outputs,
        "per_token_loss": case.shaped(token_values(step.terms)),
        "logprobs": case.shaped(head_output.logprobs_T),
        "metrics": step_metrics(step),
    }


def evaluate_all_positions(replayed: Replayed, head_output: TokenLogprobs, mean_logit_T: torch.Tensor) -> Step:
    """Evaluate the loss on every position, with sums of rows over those that train."""
    case, row, spec = replayed.case, replayed.row, replayed.translation.spec
    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages")
    raw = {name: case.everywhere(name) for name in names}
    live_T, sampler_T = head_output.logprobs_T.detach(), raw["rollout_logprobs"]
    drawn_T = (
        None if sampler_T is None else torch.where(row.loss_mask_T, sampler_T, torch.full_like(sampler_T, UNSAMPLED))
    )
    inputs = LossInputs(
        live_T,
        live_T if raw["old_logprobs"] is None else raw["old_logprobs"],
        raw["advantages"],
        drawn_T,
        raw["ref_logprobs"] if replayed.settings.use_ref_model else None,
        head_output.entropy_T.detach(),
        loss_mask_T=torch.ones_like(row.loss_mask_T),
        document_ids_T=row.document_ids_T,
        lengths_T=row.lengths_T,
        logsumexp_T=head_output.logsumexp_T.detach(),
        mean_squared_logit_T=head_output.mean_squared_logit_T.detach(),
        sums=DocumentSums(row.document_ids_T, row.loss_mask_T),
    )
    settings = replayed.settings
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
        raw["old_logprobs"] is None,
        settings.logprob_floor,
    )


def masked(case: Case) -> dict[str, Any]:
    """Replay sums and means of values under a mask; a mean over rows is undefined if a row has none."""
    settings = parse_settings(MaskedSettings, case.config, where="nous_torchtitan")
    if not settings.per_seq:
        spec = LossSpec(denominator="raw" if "sum" in case.function else "token")
        return aggregation(case, spec, result="result")
    leaf = case["values"].clone().requires_grad_()
    make = document_totals if "sum" in case.function else mean_of_document_means
    result = make(leaf.reshape(-1), case.loss_mask_T, case.document_ids_T, case.shape[0])
    cotangent = case.get("cotangent")
    result.backward(torch.ones_like(result) if cotangent is None else cotangent)
    return {"result": result.detach(), "grad_values": leaf.grad, "metrics": {}}


def reward_norm(case: Case) -> dict[str, Any]:
    """Replay rewards against the mean of their group, in standard deviations of it."""
    settings = parse_settings(RewardNormSettings, case.config, where="nous_torchtitan")
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
