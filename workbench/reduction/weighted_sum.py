"""From per-token terms to the scalar that a rank back-propagates: a plain weighted sum over its own tokens.

Letters: T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.losses.terms import Term
from workbench.reduction.partial import Scalar

PARTIAL = frozenset({"dp_cp"})
"""A sum over this rank's tokens is a part over dp and cp; tp ranks hold the same tokens."""


def weighted_sum(values_T: Tensor, weights_T: Tensor, loss_mask_T: Tensor) -> Scalar:
    """Sum of weight * value over this rank's tokens that count.

    Shapes:   [t], [t], [t] bool -> scalar.
    Layout:   partial over dp and cp.
    Backward: weight on tokens that count, exactly 0 elsewhere, whatever the value there (NaN included). What made
              that value can still turn the 0 into NaN (0 * inf in the adjoint of exp), so `runs.step` hands losses
              harmless inputs where nothing counts.
    """
    kept_T = torch.where(loss_mask_T, values_T, 0.0)
    return Scalar((kept_T * weights_T.to(kept_T.dtype)).sum(), PARTIAL)


def reduce_terms(terms: Mapping[str, Term], weights_T: Tensor, loss_mask_T: Tensor) -> dict[str, Scalar]:
    """Every term's share of the loss on this rank, coefficient included, and their sum under "total"."""
    parts = {name: weighted_sum(term.coefficient * term.values_T, weights_T, loss_mask_T)
             for name, term in terms.items()}
    first, *others = parts.values()
    return parts | {"total": sum(others, start=first)}
