"""Token weights, scaling contracts and advantages, computed on the whole optimizer step before anything is split.

The denominator is a property of the step, not of a rank or a micro-batch: dividing by a rank's own count gives every
layout a different loss. The weights are data, constant under autograd. There are two of each: one for the reported
number and one for the gradient, because some trainers make them differ.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.corrections import step_statistics, survivors, whole_row
from workbench.losses.kl import kl_in_reward
from workbench.reduction.denominators import ALWAYS, DENOMINATORS, GivenCounts, StepDocuments, positive_token
from workbench.rollouts.advantages.inputs import AdvantageInputs
from workbench.rollouts.advantages.registry import estimate_advantages
from workbench.rollouts.batch import RolloutBatch
from workbench.rollouts.targets import TrainingRow
from workbench.specs.losses import LossSpec, ScalingSpec
from workbench.specs.run import RunSpec

LOSS_WEIGHTS = "loss_weights"
"""Token-level extension of a batch: factor of the weights of each target."""


@dataclass(frozen=True)
class TokenWeights:
    """Factors of each target's value.

    Attributes:
        loss_T: [T] in the reported number; 0 where the target does not count.
        gradient_T: [T] in the gradient; the same tensor unless a spec makes them differ.
    """

    loss_T: Tensor
    gradient_T: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenWeights:
        """Apply one function to both; a shared tensor stays shared."""
        loss_T = function(self.loss_T)
        return TokenWeights(loss_T, loss_T if self.gradient_T is self.loss_T else function(self.gradient_T))


@dataclass(frozen=True)
class StepTotals:
    """Totals of a whole optimizer step, over all ranks and micro-batches.

    Attributes:
        tokens: targets that count.
        documents: documents with at least one target that counts.
        statistics: other numbers of the whole step for the loss, by name; see
            `workbench.losses.corrections.step_statistics`.
        scale: power of two, in the reproducible mode: factor of the loss before backward, and divisor of its gradients
            after it.
        routing: of a step with routing settings, numbers of its routes; see `workbench.train.routes`.
    """

    tokens: int
    documents: int
    statistics: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0
    routing: Mapping[str, int] = field(default_factory=dict)


def step_weights(
    rows: Sequence[TrainingRow], spec: LossSpec, given: GivenCounts | None = None, step_layout: StepLayout | None = None
) -> tuple[list[dict[str, TokenWeights]], StepTotals]:
    """Compute the weights of every target of the step, by name.

    The names are those that a term may have (README of this package): "policy", "penalty", `ALWAYS` and, if the batch
    has rewards, "positive_token".

    Formula:  loss weight     = F / D_d on every target of document d that counts, D_d from `denominators`, counted over
                                the rows of `scaling.counts` (default: the step), F from `scaling_factor` (default: 1);
                                times its value in the token-level extension "loss_weights" if the batch has one, which
                                changes no count
              gradient weight = loss weight / gradient_divisor / (M if normalize_by_documents else 1)

    Args:
        rows: all rows of the step, whole: of every dp rank and every micro-batch; in the precision of the run.
        spec: of the loss; has the denominator and its settings.
        given: counts of the step if these rows are only a part of it; the weights then leave out the engine's factor.
        step_layout: the layout, for a spec with a scaling contract: the first rows are those of the first dp rank, and
            so on. None: one rank.

    Returns:
        One mapping per row, [T] float64, and the totals. If nothing counts anywhere all weights are 0.

    Raises:
        SpecError: another denominator, or one for which the batch lacks a field.
    """
    if spec.denominator not in DENOMINATORS:
        raise SpecError(
            f"loss.denominator = {spec.denominator!r}", rule=f"one of {', '.join(DENOMINATORS)}", fix="correct the spec"
        )
    correction = spec.correction
    statistics = step_statistics([whole_row(row) for row in rows], correction) if correction.acts else {}
    counted = [
        survivors(whole_row(row, statistics), correction) if correction.denominator != "original" else row.loss_mask_T
        for row in rows
    ]
    step_layout = step_layout or StepLayout()
    layout = given or GivenCounts(
        dp=step_layout.dp, cp=step_layout.cp, micro_batches=step_layout.micro_batches(len(rows))
    )
    factor = scaling_factor(
        spec.compat.scaling, dp=layout.dp, cp=layout.cp, micro_batches=layout.micro_batches, engine=given is None
    )
    weights: list[dict[str, TokenWeights]] = [{} for _ in rows]
    for together in step_layout.counted_together(len(rows), spec.compat.scaling.counts):
        selected = [rows[index] for index in together], [counted[index] for index in together]
        for index, by_name in zip(together, _counted_weights(*selected, spec, given, factor), strict=True):
            weights[index] = by_name
    tokens = sum(int(row.loss_mask_T.sum()) for row in rows)
    documents = sum(row.document_ids_T[row.loss_mask_T].unique().numel() for row in rows)
    return weights, StepTotals(tokens, documents, statistics)


def _counted_weights(
    rows: Sequence[TrainingRow], counted: Sequence[Tensor], spec: LossSpec, given: GivenCounts | None, factor: float
) -> list[dict[str, TokenWeights]]:
    """Weights of rows that share one count, each multiplied by a factor."""
    with_empty = spec.compat.documents_counted == "all"
    step = StepDocuments.of(rows, [row.loss_mask_T for row in rows], with_empty=with_empty, given=given)
    policy_step = step
    if any(counted_T is not row.loss_mask_T for counted_T, row in zip(counted, rows, strict=True)):
        policy_step = StepDocuments.of(rows, counted, with_empty=with_empty, given=given)
    denominators = {"policy": DENOMINATORS[spec.denominator], "penalty": DENOMINATORS[spec.denominator]} | ALWAYS
    if step.rewards_N is not None:
        denominators["positive_token"] = positive_token
    gradient_divisor = spec.compat.gradient_divisor
    if spec.compat.normalize_by_documents:
        gradient_divisor *= max(policy_step.num_documents, 1)
    places = [(row, step.in_row(number), row.document_ids_T.clamp_min(0)) for number, row in enumerate(rows)]

    @functools.cache  # several names may have one denominator
    def of_rows(denominator: Callable[[StepDocuments, LossSpec], Tensor], of_policy: bool) -> list[TokenWeights]:
        divisor_N = denominator(policy_step if of_policy else step, spec)
        if spec.truncated == "silent":
            divisor_N = torch.where(_truncated(step), torch.inf, divisor_N)
        loss_N = torch.where(divisor_N > 0, factor / divisor_N, 0.0)
        weights = []
        for row, lines, ids_T in places:
            of_row_N = loss_N[lines]
            of_row_T = of_row_N[ids_T] if len(of_row_N) else loss_N.new_zeros(())
            loss_T = torch.where(row.loss_mask_T, of_row_T, 0.0)
            if LOSS_WEIGHTS in row.extensions:
                loss_T = loss_T * torch.where(row.loss_mask_T, row.extensions[LOSS_WEIGHTS].double(), 0.0)
            weights.append(TokenWeights(loss_T, loss_T if gradient_divisor == 1 else loss_T / gradient_divisor))
        return weights

    by_name = {
        name: of_rows(denominator, name == "policy" and policy_step is not step)
        for name, denominator in denominators.items()
    }
    return [{name: weights[number] for name, weights in by_name.items()} for number in range(len(rows))]


def _truncated(step: StepDocuments) -> Tensor:
    if step.truncated_N is None:
        raise SpecError(
            "loss.truncated = 'silent'",
            found="a batch without the extension truncated",
            rule="the token-level extension truncated is 1 on every token of a document that was cut off, else 0",
            fix="record it with the rollouts, or let truncated documents train",
        )
    return step.truncated_N


def compute_advantages(batch: RolloutBatch, spec: RunSpec) -> RolloutBatch:
    """Return the documents of a step with the advantages that the spec requests.

    Raises:
        SpecError: the batch lacks a field that the estimator, or a KL penalty in the reward, needs.
    """
    estimator, kl = spec.data.advantages, spec.loss.kl
    if estimator.name == "recorded":
        return batch
    penalties_T, values = None, batch.extensions.get("values")
    if kl.coefficient and kl.placement == "reward":
        if batch.ref_logprobs_T is None:
            raise SpecError(
                "loss.kl.placement = 'reward'",
                found="no ref_logprobs",
                rule="the penalty compares the old policy with the reference policy",
                fix="record ref_logprobs with the rollouts, or leave the penalty out",
            )
        penalties_T = kl_in_reward(batch.old_logprobs_T, batch.ref_logprobs_T, batch.loss_mask_T, kl)
    inputs = AdvantageInputs.of(batch, penalties_T=penalties_T, values_T=None if values is None else values.values)
    settings: dict[str, Any] = estimator.settings
    return replace(batch, advantages_T=estimate_advantages(estimator.name, inputs, **settings).advantages_T)


@dataclass(frozen=True)
class StepLayout:
    """Split of a step into ranks, dp with rows of their own times cp that share them."""

    dp: int = 1
    cp: int = 1

    def micro_batches(self, rows: int) -> int:
        """Number of rows that each dp rank trains on, one after another, before it steps.

        Raises:
            SpecError: the rows do not divide evenly over the ranks.
        """
        if rows % self.dp:
            raise SpecError(
                f"{rows} rows on {self.dp} data-parallel ranks",
                rule="each rank takes the same number of rows",
                fix="pack the step into a multiple of dp rows",
            )
        return rows // self.dp

    def counted_together(self, rows: int, counts: str) -> list[range]:
        """Rows that share one count: all of the step, those of one pass of all dp ranks, or each its own."""
        stride = {"step": 1, "pass": self.micro_batches(rows), "micro_batch": rows}[counts]
        return [range(start, rows, stride) for start in range(stride)]


def scaling_factor(scaling: ScalingSpec, *, dp: int, cp: int, micro_batches: int, engine: bool = True) -> float:
    """Factor of a token's gradient, in addition to its weight, from the trainer and its engine.

    Formula:  multiplied_by * engine_multiplies * (cp if replicated) / (divided_by * engine_divides), each name its
              size; without ``engine`` that of the trainer's returned loss, multiplied_by / divided_by
    """
    sizes = {"dp": dp, "cp": cp, "dp_cp": dp * cp, "micro_batches": micro_batches}

    def product(names: Sequence[str]) -> int:
        return math.prod(sizes[name] for name in names)

    trainer = product(scaling.multiplied_by) / product(scaling.divided_by)
    if not engine:
        return trainer
    gathered = cp if scaling.replicated else 1
    return trainer * gathered * product(scaling.engine_multiplies) / product(scaling.engine_divides)
