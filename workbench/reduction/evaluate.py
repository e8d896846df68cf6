"""A loss on one row, from the output of the policy's head to plain weighted sums that can be back-propagated.

`workbench.train.step` calls it once for each micro-batch, `workbench.systems` once for each case of another system.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.errors import SpecError
from workbench.losses.corrections import CORRECTION_WEIGHTS
from workbench.losses.document_sums import DocumentSums
from workbench.losses.terms import Loss, LossInputs, Term
from workbench.policy.logprobs import TokenLogprobs
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import StepTotals, TokenWeights
from workbench.rollouts.targets import TrainingRow
from workbench.rollouts.versions import STALENESS

PARTIAL = frozenset({"dp_cp"})
"""A sum over this rank's tokens is a part over dp and cp; tp ranks hold the same tokens."""


class Evaluated(NamedTuple):
    """Result of a loss on one row, or on some of its tokens: per-token terms by name, and `reduce_terms` of them."""

    inputs: LossInputs
    terms: Mapping[str, Term]
    scalars: Mapping[str, Scalar]


def loss_inputs(
    row: TrainingRow,
    head_output: TokenLogprobs,
    totals: StepTotals,
    sums: DocumentSums | None = None,
    frozen_clip_T: Tensor | None = None,
) -> LossInputs:
    """Build the inputs of a loss: the head's output for each token, the row's own data, numbers of the whole step.

    Where nothing counts the ratio is 1, whatever the head returns: no exp can overflow into a gradient. ``sums`` are
    over documents that may straddle ranks, None if the row is whole; ``frozen_clip_T`` are clip decisions taken
    elsewhere.
    """
    return LossInputs(
        policy_logprobs_T=torch.where(row.loss_mask_T, head_output.logprobs_T, row.old_logprobs_T),
        old_logprobs_T=row.old_logprobs_T,
        advantages_T=row.advantages_T,
        sampler_logprobs_T=row.sampler_logprobs_T,
        ref_logprobs_T=row.ref_logprobs_T,
        entropy_T=head_output.entropy_T,
        logsumexp_T=head_output.logsumexp_T,
        mean_squared_logit_T=head_output.mean_squared_logit_T,
        mean_logit_T=head_output.mean_logit_T,
        frozen_clip_T=frozen_clip_T,
        loss_mask_T=row.loss_mask_T,
        document_ids_T=row.document_ids_T,
        lengths_T=row.lengths_T,
        rewards_T=row.rewards_T,
        group_ids_T=row.group_ids_T,
        source_T=row.source_T,
        correction_weights_T=row.extensions.get(CORRECTION_WEIGHTS),
        staleness_T=row.extensions.get(STALENESS),
        sums=sums,
        statistics=totals.statistics,
    )


def evaluate_loss(
    loss: Loss, inputs: LossInputs, weights: Mapping[str, TokenWeights], loss_mask_T: Tensor
) -> Evaluated:
    """Evaluate the per-token terms, and their weighted sums over the tokens that count.

    Backward: of ``scalars["total"].value``, the gradient weights; see `weighted_sum`.
    """
    terms = loss(inputs)
    return Evaluated(inputs, terms, reduce_terms(terms, weights, loss_mask_T))


def token_values(terms: Mapping[str, Term]) -> Tensor:
    """[T] unweighted contribution of each token to a loss: the sum over terms of coefficient * value."""
    first, *others = (term.coefficient * term.values_T for term in terms.values())
    return sum(others, start=first)


def weighted_sum(values_T: Tensor, weights: TokenWeights, loss_mask_T: Tensor) -> Scalar:
    """Sum of weight * value over this rank's tokens that count, with a separate weight for the gradient.

    Formula:  value = sum_t loss_t values_t
    Shapes:   [t], [t], [t] bool -> scalar.
    Layout:   partial over dp and cp.
    Backward: the gradient weight on tokens that count, exactly 0 elsewhere, for any value there (NaN included). The
              operation that computed that value can still turn the 0 into NaN (0 * inf in the adjoint of exp), so
              `train.step` passes losses harmless inputs where nothing counts.
    """
    masked_T = torch.where(loss_mask_T, values_T, 0.0)
    loss_T = weights.loss_T.to(masked_T.dtype)
    if weights.gradient_T is weights.loss_T:
        return Scalar((masked_T * loss_T).sum(), PARTIAL)
    return Scalar(_TwoWeights.apply(masked_T, loss_T, weights.gradient_T.to(masked_T.dtype)), PARTIAL)


def reduce_terms(
    terms: Mapping[str, Term], weights: Mapping[str, TokenWeights], loss_mask_T: Tensor
) -> dict[str, Scalar]:
    """Compute each term's share of the loss on this rank, coefficient included, and their sum under "total".

    Each term is summed with the weights that it names (`Term.weight`).

    Raises:
        SpecError: a term names weights that the step does not have.
    """
    parts = {}
    for name, term in terms.items():
        if term.weight not in weights:
            raise SpecError(
                f"term {name!r} with weights {term.weight!r}",
                found=f"weights {', '.join(weights)}",
                rule='a term names weights of the step; "policy" are those of loss.denominator',
                fix='take one of these, or make it the spec\'s denominator and name "policy"',
            )
        parts[name] = weighted_sum(term.coefficient * term.values_T, weights[term.weight], loss_mask_T)
    first, *others = parts.values()
    return parts | {"total": sum(others, start=first)}


class _TwoWeights(Function):
    """sum(w * values), whose gradient is g and not w."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, loss_T: Tensor, gradient_T: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_T)
        return (values_T * loss_T).sum()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        (gradient_T,) = ctx.saved_tensors
        return cotangent * gradient_T, None, None
