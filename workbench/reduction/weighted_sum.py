"""Reduction of per-token terms to the scalar that a rank back-propagates: a plain weighted sum over its own tokens.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workbench.errors import SpecError
from workbench.losses.terms import Term
from workbench.reduction.partial import Scalar
from workbench.reduction.weights import TokenWeights

PARTIAL = frozenset({"dp_cp"})
"""A sum over this rank's tokens is a part over dp and cp; tp ranks hold the same tokens."""


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
