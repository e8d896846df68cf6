"""Metrics of the policy in a step: ratio, clipping, KL, entropy, advantages, correction weights.

One pass over declarations (`workbench.metrics.definitions`): the columns that they need are stacked, masked and summed
under every weight with one GEMM; extremes with one maximum. Nothing waits for the device; numbers are read when
`workbench.metrics.values.finish_metrics` merges micro-batches and ranks.

Letters: T packed tokens | K parts that add | M parts of which the largest counts | W weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.terms import LossInputs, Term
from workbench.metrics.definitions import LEVELS, AnyMetric, DocumentMetric, Level, Metric, declared
from workbench.metrics.quantities import Column, DocumentSlots, Quantities, clip_rule
from workbench.metrics.values import OfDocuments, Power, Value
from workbench.specs.losses import LossSpec


def policy_metrics(
    inputs: LossInputs,
    terms: Mapping[str, Term],
    loss_mask_T: Tensor,
    level: Level = "basic",
    loss_spec: LossSpec | None = None,
    slots: DocumentSlots | None = None,
) -> dict[str, Value]:
    """Compute the unfinished metrics of one micro-batch on one rank. The same keys on every rank, tokens or not.

    The keys depend on the level, the loss and the log-probabilities of the batch, never on the tokens of a
    micro-batch.

    Args:
        inputs: of the loss.
        terms: its result.
        loss_mask_T: [T] bool, the population.
        level: "none", "basic" or "full".
        loss_spec: the loss's settings, for the bounds of its clip; None: metrics of the clip region are left out.
        slots: the numbers of the row's documents in the whole step; None: metrics of whole documents are left out.

    Raises:
        SpecError: another level.
    """
    if level not in LEVELS:
        raise SpecError(f"record.metrics = {level!r}", rule=f"one of {', '.join(LEVELS)}", fix="correct the spec")
    if level == "none":
        return {}
    clip = clip_rule(loss_spec)
    chosen = declared([name for name, term in terms.items() if term.clipped_T is not None], clip)
    return measure(
        (metric for metric in chosen if LEVELS.index(metric.level) <= LEVELS.index(level)),
        Quantities(inputs, terms, loss_mask_T, clip=clip, slots=slots),
    )


def measure(metrics: Iterable[AnyMetric], q: Quantities) -> dict[str, Value]:
    """Compute the declared metrics of one micro-batch, unfinished; those without their quantities are left out."""
    with torch.no_grad():
        known = [metric for metric in metrics if _is_known(metric, q)]
        plain = [metric for metric in known if isinstance(metric, Metric) and metric.reducer.plain]
        totals = _totals(plain, q)
        extremes = _extremes(plain, q)
        values = {}
        for metric in known:
            if isinstance(metric, DocumentMetric):
                values[metric.key] = _of_documents(metric, q)
            elif metric.reducer.plain:
                values[metric.key] = Value(
                    metric.reducer,
                    tuple(totals[metric.column, power, metric.weight] for power in metric.reducer.powers),
                    tuple(extremes[metric.column, sign] for sign in metric.reducer.signs),
                )
            else:
                values[metric.key] = metric.reducer.over(
                    q.column(metric.column), q.population(metric.column), q.weights(metric.weight)
                )
    return values


def _totals(metrics: list[Metric], q: Quantities) -> dict[tuple[Column, Power, str], Tensor]:
    """Compute every sum that the metrics need: one stack, one mask, one GEMM. [K, T] @ [T, W]."""
    needed = list(dict.fromkeys((metric.column, power) for metric in metrics for power in metric.reducer.powers))
    weights = list(dict.fromkeys(metric.weight for metric in metrics if metric.reducer.powers))
    if not needed:
        return {}
    rows_KT = torch.stack([_power(q, column, power) for column, power in needed])
    masks_KT = torch.stack([q.population(column) for column, _ in needed])
    weights_TW = torch.stack([q.weights(name) for name in weights], dim=1)
    totals_KW = torch.where(masks_KT, rows_KT, 0.0) @ torch.where(q.mask_T[:, None], weights_TW, 0.0)
    return {
        (column, power, name): total
        for (column, power), line in zip(needed, totals_KW.unbind(), strict=True)
        for name, total in zip(weights, line.unbind(), strict=True)
    }


def _extremes(metrics: list[Metric], q: Quantities) -> dict[tuple[Column, int], Tensor]:
    """Compute every maximum that the metrics need (a minimum is one of negated values): one stack, one mask. [M, T]."""
    needed = list(dict.fromkeys((metric.column, sign) for metric in metrics for sign in metric.reducer.signs))
    if not needed:
        return {}
    rows_MT = torch.stack([q.column(column) if sign > 0 else -q.column(column) for column, sign in needed])
    masked_MT = torch.where(torch.stack([q.population(column) for column, _ in needed]), rows_MT, -torch.inf)
    if not masked_MT.shape[1]:
        masked_MT = masked_MT.new_full((len(needed), 1), -torch.inf)
    return dict(zip(needed, masked_MT.amax(1).unbind(), strict=True))


def _power(q: Quantities, column: Column, power: Power) -> Tensor:
    exponent, pivot = power
    if exponent == 0:
        return q.one_T
    values_T = q.column(column)
    centred_T = values_T - pivot if pivot else values_T
    return centred_T.square() if exponent == 2 else centred_T


def _of_documents(metric: DocumentMetric, q: Quantities) -> Value:
    mask_T = q.population_of(metric.needs)
    return OfDocuments(metric.read, len(metric.columns), q.slots.number, len(metric.extremes)).table(
        [q.column(column) for column in metric.columns],
        mask_T,
        q.step_documents_T,
        [q.column(column) for column in metric.extremes],
    )


def _is_known(metric: AnyMetric, q: Quantities) -> bool:
    if isinstance(metric, DocumentMetric):
        return q.slots is not None and all(
            q.column(column) is not None for column in (*metric.columns, *metric.extremes)
        )
    return q.weights(metric.weight) is not None and q.column(metric.column) is not None
