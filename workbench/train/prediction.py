"""Multi-token prediction in a step: targets and weights of the whole step before the split, and the loss of a row.

    loss = coefficient / depths * sum over depths k of (1 / n_k) sum over tokens of -log p_k(token k + 1 ahead)

n_k counts the tokens of the whole step, all rows of all ranks, that train and have a position k + 1 before them in
their document. So no layout, packing or split into micro-batches changes the loss.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 24 and 25. Denominators of a rank's own tokens:
        NVIDIA/Megatron-LM#7452, finding 3.

Letters: T packed tokens | t tokens of this rank | K depths | D model dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.metrics.values import Sum, Value
from workbench.policy.model import Policy
from workbench.reduction.evaluate import weighted_sum
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import TokenWeights
from workbench.rollouts.targets import AHEAD, AHEAD_WEIGHTS, TrainingRow, tokens_ahead
from workbench.specs.mixtures import PredictionSpec
from workbench.train.rows import LocalRow


def with_predictions(rows: Sequence[TrainingRow], spec: PredictionSpec) -> list[TrainingRow]:
    """Add the tokens ahead of each position, and the weights of the step, to all of its rows, before any split."""
    ahead = [tokens_ahead(row, spec.depths) for row in rows]
    counts_K = torch.stack([counts_TK.sum(0) for _, counts_TK in ahead]).sum(0)
    weight_K = spec.coefficient / spec.depths / counts_K.clamp_min(1).to(rows[0].advantages_T.dtype)
    return [
        replace(row, extensions={**row.extensions, AHEAD: tokens_TK, AHEAD_WEIGHTS: counts_TK * weight_K})
        for row, (tokens_TK, counts_TK) in zip(rows, ahead, strict=True)
    ]


class Predicted(NamedTuple):
    """The depths of a row: the loss of each, under ``prediction_k``, and for a record its values and their number.

    Attributes:
        terms: coefficient included.
        tokens: [t] log-probability of the token k + 1 ahead, 0 where it has no weight; without a gradient.
        counts: tokens with a weight, a metric.
    """

    terms: dict[str, Scalar]
    tokens: dict[str, Tensor]
    counts: dict[str, Value]


def prediction_terms(policy: Policy, hidden_TD: Tensor, local: LocalRow, spec: PredictionSpec) -> Predicted:
    """Return the loss of each depth on this rank's tokens.

    Layout:   partial over dp and cp. Collective over cp, tp and ep.
    Backward: to the depths' layers and, unless ``spec.detach`` stops it, to hidden states, embedding and head.
    """
    row = local.row
    tokens_TK, weights_TK = row.extensions[AHEAD], row.extensions[AHEAD_WEIGHTS]
    head = policy.head_arguments()
    if spec.detach == "policy":
        head = {name: value.detach() if isinstance(value, Tensor) else value for name, value in head.items()}
    terms, tokens, counts = {}, {}, {}
    depths = policy.predicted_hidden_states(
        hidden_TD, tokens_TK[:, :-1], row.positions_T, local.attention, detach=spec.detach
    )
    for number, depth_TD in enumerate(depths, 1):
        name = f"prediction_{number}"
        terms[name], tokens[f"{name}_logprobs"] = depth_loss(
            policy, depth_TD, tokens_TK[:, number], weights_TK[:, number - 1], head
        )
        active_T = weights_TK[:, number - 1] != 0
        counts[f"prediction/tokens_{number}/sum"] = Sum().over(active_T.double(), active_T)
    return Predicted(terms, tokens, counts)


def depth_loss(
    policy: Policy, hidden_TD: Tensor, targets_T: Tensor, weights_T: Tensor, head: Mapping
) -> tuple[Scalar, Tensor]:
    """Weighted sum of the negative log-likelihood, at temperature 1, of one depth's targets; and their values.

    Shapes:   [t, D], [t], [t] -> scalar, partial over dp and cp, and [t] without a gradient.
    """
    active_T = weights_T != 0
    temperature_T = torch.ones_like(weights_T)
    output = policy.token_logprobs(
        hidden_TD, targets_T.clamp_min(0), temperature_T, active_T=active_T, outputs=(), head=head
    )
    values_T = torch.where(active_T, output.logprobs_T.detach(), 0.0)
    return weighted_sum(-output.logprobs_T, TokenWeights(weights_T, weights_T), active_T), values_T


def with_prediction_terms(scalars: Mapping[str, Scalar], terms: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Add the terms of the depths to those of a loss, and to its total."""
    return {**scalars, **terms, "total": sum(terms.values(), start=scalars["total"])}
