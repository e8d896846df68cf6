"""How much each token counts: weights computed on the whole optimizer step, before anything is split.

The denominator is a property of the step, not of a rank or a micro-batch: dividing by what a rank happens to hold
gives every layout a loss of its own. The weights are data; autograd never sees where they come from.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.targets import TrainingRow

DENOMINATORS = ("token", "document")


@dataclass(frozen=True)
class StepTotals:
    """What a whole optimizer step holds, over all ranks and micro-batches.

    Attributes:
        tokens: targets that count.
        documents: documents with at least one target that counts.
    """

    tokens: int
    documents: int


def step_weights(rows: Sequence[TrainingRow], denominator: str) -> tuple[list[Tensor], StepTotals]:
    """Weight of every target of the step.

    token:    1 / tokens of the step, on every target that counts.
    document: 1 / (documents of the step * targets that count in the target's own document).

    Args:
        rows: all rows of the step, whole: of every dp rank and every micro-batch.
        denominator: "token" or "document".

    Returns:
        One [T] float64 tensor a row, 0 where the target does not count, and the totals. If nothing counts
        anywhere all weights are 0.

    Raises:
        SpecError: another denominator.
    Source:
        token: DAPO, arXiv 2503.14476, equation 8; document: DeepSeekMath, arXiv 2402.03300, equation 3.
    """
    if denominator not in DENOMINATORS:
        raise SpecError(f"loss.denominator = {denominator!r}", rule=f"one of {', '.join(DENOMINATORS)}",
                        fix="correct the spec")
    lengths = [_trained_in_own_document(row) for row in rows]
    tokens = sum(int(row.loss_mask_T.sum()) for row in rows)
    documents = sum(int((row.document_ids_T[row.loss_mask_T]).unique().numel()) for row in rows)
    weights = []
    for row, length_T in zip(rows, lengths, strict=True):
        per_T = torch.full_like(length_T, tokens) if denominator == "token" else documents * length_T
        weights.append(torch.where(row.loss_mask_T, 1.0 / per_T, 0.0))
    return weights, StepTotals(tokens, documents)


def _trained_in_own_document(row: TrainingRow) -> Tensor:
    """[T] float64: targets that count in each position's document."""
    ids = row.document_ids_T + 1  # padding is document -1
    counts = torch.bincount(ids, weights=row.loss_mask_T.double(), minlength=1)
    return counts[ids]
