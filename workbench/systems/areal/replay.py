"""Replays of AReaL's functions from their arrays.

Letters: T packed tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workbench.losses.build import surrogate_ratio
from workbench.losses.value import value_loss
from workbench.reduction.weighted_sum import reduce_terms
from workbench.reduction.weights import step_weights
from workbench.rollouts.advantages.tokens import standardize
from workbench.specs.losses import LossSpec
from workbench.systems.areal.settings import CriticSettings, NormalizationSettings
from workbench.systems.case import Case
from workbench.systems.registry import parse_settings
from workbench.systems.replays import Replayed


def case_settings(case: Case) -> dict[str, Any]:
    """Return the options; the function's name selects the loss."""
    return {"use_sapo_loss": "sapo" in case.function, "use_cispo_loss": "cispo" in case.function, **case.config}


def outputs(replayed: Replayed) -> dict[str, Tensor]:
    """Return the ratio, and the result of rejection on each token."""
    extras = replayed.evaluated.terms["policy"].extras
    arrays = {"importance_weight": surrogate_ratio(replayed.inputs, replayed.translation.spec)}
    if replayed.settings.rejection_sampling is not None:
        arrays |= {"behave_is_weight": extras["applied_weight"], "kept_mask": extras["kept"].double()}
    return arrays


def critic(case: Case) -> dict[str, Any]:
    """Replay the critic's loss, a mean over tokens."""
    settings = parse_settings(CriticSettings, case.config, where="areal")
    leaf = case["values"].clone().requires_grad_()
    row = case.row()
    term = value_loss(
        leaf.reshape(-1),
        case["returns"].reshape(-1),
        row.loss_mask_T,
        old_values_T=case["old_values"].reshape(-1),
        clip=settings.value_eps_clip,
        kind=settings.loss_fn_type,
        delta=settings.huber_delta,
    )
    (weights,), _ = step_weights([row], LossSpec(name="grpo"))
    total = reduce_terms({"value": term}, weights, row.loss_mask_T)["total"].value
    total.backward()
    return {"loss": total.detach(), "grad_values": leaf.grad}


def normalization(case: Case) -> dict[str, Any]:
    """Replay the normalization of values; where the mask is 0, the result is that of the value 0."""
    settings = parse_settings(NormalizationSettings, case.config, where="areal")
    return {
        "result": standardize(
            case["values"],
            None if case.get("mask") is None else case["mask"].bool(),
            dims=settings.dim,
            ddof=int(settings.unbiased),
            epsilon=settings.eps,
        )
    }
