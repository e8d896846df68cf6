"""linkedin/Liger-Kernel: losses fused with the output head, on policies (`LigerFusedLinearGRPOLoss`) and on pairs.

Letters: T packed tokens | N documents | P pairs | V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.losses.preference import document_rewards, pair_losses, pair_weights
from workbench.losses.terms import LossInputs, Term
from workbench.policy.logprobs.reference import token_logprobs
from workbench.reduction.evaluate import reduce_terms
from workbench.reduction.weights import TokenWeights
from workbench.systems.case import Case
from workbench.systems.liger import metrics as named
from workbench.systems.liger.settings import DPOSettings, LigerSettings
from workbench.systems.liger.translate import CONTRACTS, back, counts, translate
from workbench.systems.registry import HEAD, System
from workbench.systems.replays import Replayed, back_propagate, fused_linear_policy_loss, head
from workbench.systems.trl import with_weights_of_rows


def case_settings(case: Case) -> dict[str, Any]:
    """Return the options; some follow from the arrays: the reference, and the shape of ready-made weights."""
    reference = any(case.get(name) is not None for name in ("ref_logprobs", "ref_hidden"))
    options = {"use_ref_model": reference, **case.config}
    weights = case.get("is_weights")
    if weights is not None:
        options["vllm_is"] = "token" if weights.shape == case.shape else "sequence"
    return options


def further_metrics(replayed: Replayed) -> dict[str, float]:
    """Return the zeros that a loss without a clip, or without a reference, reports."""
    settings = replayed.settings
    metrics = {"clip_fraction": 0.0} if settings.loss_type in ("sapo", "vespo") else {}
    return metrics | ({"kl": 0.0} if settings.beta and not settings.use_ref_model else {})


def policy_loss_case(case: Case) -> dict[str, Any]:
    """Replay the loss from hidden states."""
    return fused_linear_policy_loss(with_weights_of_rows(case))


def dpo_case(case: Case) -> dict[str, Any]:
    """Replay a loss on pairs from hidden states: rows of the first half are chosen, those of the second rejected."""
    settings = case.options(DPOSettings)
    counts_T = (case["targets"] != settings.ignore_index).reshape(-1)
    leaves, head_output = head(case)
    live_T = head_output.logprobs_T.detach()
    inputs = LossInputs(
        head_output.logprobs_T,
        live_T,
        torch.zeros_like(live_T),
        ref_logprobs_T=_reference(case, settings),
        loss_mask_T=counts_T,
        document_ids_T=case.document_ids_T,
    )
    rows = case.shape[0]
    pairs, against = rows // 2, "ref" if settings.use_ref_model else None
    rewards_N = document_rewards(inputs, rows, against=against, average=settings.average_log_prob)
    smoothing = settings.label_smoothing if settings.loss_type in ("exo_pair", "robust") else 0.0
    losses_P = pair_losses(
        rewards_N[:pairs],
        rewards_N[pairs:],
        beta=settings.beta,
        kind=settings.loss_type,
        label_smoothing=smoothing,
        modulation=settings.discopop_tau,
    )
    terms = {"policy": Term(losses_P)}
    all_P = torch.ones_like(rewards_N[:pairs], requires_grad=False)
    pair_P = pair_weights(all_P)
    weights = {"policy": TokenWeights(pair_P, pair_P)}
    if settings.compute_nll_loss:
        likelihoods_N = document_rewards(inputs, rows, against=None)
        terms["nll"] = Term(likelihoods_N[:pairs], coefficient=-settings.alpha, weight="chosen_token")
        token_P = pair_weights(all_P, pairs=len(torch.nonzero(case.shaped(counts_T)[:pairs])))
        weights["chosen_token"] = TokenWeights(token_P, token_P)
    return back_propagate(reduce_terms(terms, weights, all_P.bool())["total"].value, leaves)


def _reference(case: Case, settings: DPOSettings) -> Tensor | None:
    """[T] log-probabilities of the reference; without a head of its own it has the policy's."""
    if not settings.use_ref_model:
        return None
    weight_VD, bias_V = case.get("ref_weight"), case.get("ref_bias")
    if weight_VD is None:
        weight_VD, bias_V = case["weight"], case.get("bias")
    return token_logprobs(case["ref_hidden"].flatten(0, -2), weight_VD, case.targets_T, bias_V=bias_V).logprobs_T


SYSTEM = System(
    name="liger",
    title="Liger-Kernel",
    version="0.8.5",
    settings=LigerSettings,
    translate=translate,
    back=back,
    counts=counts,
    scaling=CONTRACTS,
    case_settings=case_settings,
    temperature=lambda settings: settings.temperature,
    metrics=further_metrics,
    replays={"fused_linear_policy_loss": policy_loss_case, "fused_linear_dpo": dpo_case},
    arrays=("old_logprobs", "ref_logprobs", "is_weights"),
    arrays_of={"fused_linear_dpo": HEAD},
    aliases=named.names,
)
