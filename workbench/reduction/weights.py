"""How much each token counts: weights computed on the whole optimizer step, before anything is split.

The denominator is a property of the step, not of a rank or a micro-batch: dividing by what a rank happens to hold
gives every layout a loss of its own. The weights are data; autograd never sees where they come from. There are two
of each: one for the number that is reported and one for the gradient, and some trainers make them differ.

Letters: T packed tokens | N documents of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.corrections import step_statistics, survivors, whole_row
from workbench.losses.spec import LossSpec
from workbench.reduction.denominators import ALWAYS, DENOMINATORS, StepDocuments, positive_token
from workbench.rollouts.targets import TrainingRow


@dataclass(frozen=True)
class TokenWeights:
    """What each target's value is multiplied with.

    Attributes:
        loss_T: [T] in the number that is reported; 0 where the target does not count.
        gradient_T: [T] in the gradient; the same tensor unless a spec makes them differ.
    """

    loss_T: Tensor
    gradient_T: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenWeights:
        """Apply one function to both; what was one tensor stays one."""
        loss_T = function(self.loss_T)
        return TokenWeights(loss_T, loss_T if self.gradient_T is self.loss_T else function(self.gradient_T))


@dataclass(frozen=True)
class StepTotals:
    """What a whole optimizer step holds, over all ranks and micro-batches.

    Attributes:
        tokens: targets that count.
        documents: documents with at least one target that counts.
        statistics: other numbers of the whole step that a loss may look at, by name; see
            `workbench.losses.corrections.step_statistics`.
    """

    tokens: int
    documents: int
    statistics: Mapping[str, float] = field(default_factory=dict)


def step_weights(rows: Sequence[TrainingRow], spec: LossSpec) -> tuple[list[dict[str, TokenWeights]], StepTotals]:
    """Weights of every target of the step, by name.

    "policy" is the denominator of the spec, and "penalty" the same for terms that no correction touches. A term may
    also ask for "token", "document", "document_sum", "raw" and,
    where the batch has rewards, "positive_token" (1 / trained tokens of documents with a reward above 0, and 0 on all
    others).

    Where the correction of the spec counts survivors, the D_d of "policy" does so too: targets that it rejects have
    values of 0 and are not in the count; a document that is rejected whole weighs nothing. All other weights, whose
    terms keep their values on rejected targets, count every trained target.

    Formula:  loss weight     = 1 / D_d on every target of document d that counts, D_d from `denominators`
              gradient weight = loss weight / gradient_divisor / (M if normalize_by_documents else 1)

    Args:
        rows: all rows of the step, whole: of every dp rank and every micro-batch; in the precision of the run.
        spec: which denominator, with its settings.

    Returns:
        One mapping a row, [T] float64, and the totals. If nothing counts anywhere all weights are 0.

    Raises:
        SpecError: another denominator, or one for which the batch lacks a field.
    """
    if spec.denominator not in DENOMINATORS:
        raise SpecError(f"loss.denominator = {spec.denominator!r}", rule=f"one of {', '.join(DENOMINATORS)}",
                        fix="correct the spec")
    correction = spec.correction
    statistics = step_statistics([whole_row(row) for row in rows], correction) if correction.acts else {}
    counted = [survivors(whole_row(row, statistics), correction) if correction.denominator == "survivors"
               else row.loss_mask_T for row in rows]
    with_empty = spec.documents_counted == "all"
    kept = StepDocuments.of(rows, counted, with_empty=with_empty)
    step = StepDocuments.of(rows, [row.loss_mask_T for row in rows], with_empty=with_empty)
    wanted = {"policy": DENOMINATORS[spec.denominator], "penalty": DENOMINATORS[spec.denominator]} | ALWAYS
    if step.rewards_N is not None:
        wanted["positive_token"] = positive_token
    further = spec.gradient_divisor * (max(kept.num_documents, 1) if spec.normalize_by_documents else 1)
    weights: list[dict[str, TokenWeights]] = [{} for _ in rows]
    for name, denominator in wanted.items():
        divisor_N = denominator(kept if name == "policy" else step, spec)
        loss_N = torch.where(divisor_N > 0, 1.0 / divisor_N, 0.0)
        for number, row in enumerate(rows):
            loss_T = _on_targets(loss_N[step.in_row(number)], row)
            weights[number][name] = TokenWeights(loss_T, loss_T if further == 1 else loss_T / further)
    tokens = sum(int(row.loss_mask_T.sum()) for row in rows)
    documents = sum(row.document_ids_T[row.loss_mask_T].unique().numel() for row in rows)
    return weights, StepTotals(tokens, documents, statistics)


def _on_targets(values_N: Tensor, row: TrainingRow) -> Tensor:
    """[T] a document's value on each of its targets that count, 0 elsewhere."""
    if not len(values_N):
        return torch.zeros(row.loss_mask_T.shape, dtype=torch.float64)
    return torch.where(row.loss_mask_T, values_N[row.document_ids_T.clamp_min(0)], 0.0)
