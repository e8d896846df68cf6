"""Head outputs of the rows of a pass as they become known, and the loss of some or all of them.

Letters: A rows that are computed, in the order of the plan | C rows of a chunk | F requested fields of `TokenLogprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.policy.logprobs.coefficients import RowLoss, gradients_of, slice_of
from workbench.policy.logprobs.head import TokenLogprobs
from workbench.policy.logprobs.truncated_support import full_where_empty


@dataclass
class RowOutputs:
    """Head outputs of all rows, zeros at first, and evaluations of the loss on them.

    Attributes:
        loss_fn: of the caller.
        fields: requested fields of `TokenLogprobs`, the log-probability first.
        places_A: indices of the rows in the row of T.
        ascending_A: permutation to the order of the row; None: in order.
        expected_A: expected log-probabilities; None: nothing is expected.
        untruncated_A: rows without a truncated support of their own; None: there are no supports.
        dtype: of the outputs.
        values: [A] each, by field.
        used_fields: those on which the loss was seen to depend.
    """

    loss_fn: RowLoss
    fields: tuple[str, ...]
    places_A: Tensor
    ascending_A: Tensor | None
    expected_A: Tensor | None
    untruncated_A: Tensor | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        rows = len(self.places_A)
        zeros = self.places_A.new_zeros(len(self.fields) + 1, rows, dtype=self.dtype)  # one launch
        *self.values, self._zeros_A = zeros
        self.everything = slice(0, rows)
        self.used_fields: set[str] = set()
        self._is_pure = False

    def record(self, output: TokenLogprobs, some: slice | Tensor) -> None:
        """Set the outputs of some rows; those of all rows are kept, not copied."""
        values = [getattr(output, name) for name in self.fields]
        if isinstance(some, slice) and some == self.everything:
            self.values = values
        elif isinstance(some, slice):  # one launch for all fields
            torch._foreach_copy_([value_A[some] for value_A in self.values], values)
        else:
            for value_A, value_C in zip(self.values, values, strict=True):
                value_A[some] = value_C

    def loss(self, rows: slice, outputs_FC: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Evaluate the loss of some rows, without a graph, and its coefficients [F, C].

        Of known outputs, or others that are given. The whole row is passed in its own order.
        """
        outputs = [value_A[rows] for value_A in self.values] if outputs_FC is None else outputs_FC
        leaves = [output_C.detach().requires_grad_() for output_C in outputs]
        shown, places = leaves, self.places_A[rows]
        untruncated = None if self.untruncated_A is None else self.untruncated_A[rows]
        with torch.enable_grad():
            if rows == self.everything and self.ascending_A is not None:
                order = self.ascending_A
                shown, places = [leaf.index_select(0, order) for leaf in leaves], places[order]
                untruncated = None if untruncated is None else untruncated[order]
            head_output = TokenLogprobs(**dict(zip(self.fields, shown, strict=True)))
            loss = self.loss_fn(full_where_empty(head_output, untruncated), places)
        gradients = gradients_of(loss, leaves, check=not self._is_pure)
        self._is_pure |= loss.requires_grad
        self.used_fields |= {name for name, g_C in zip(self.fields, gradients, strict=True) if g_C is not None}
        unused_C = self._zeros_A[: len(places)]
        return loss.detach(), torch.stack([unused_C if g_C is None else g_C for g_C in gradients])

    def assumed(self, rows: slice, known: slice | None = None, by: int = 0) -> Tensor:
        """[F, C] assumed outputs of a document of which one chunk, or none, is known; unevenly shifted."""
        count = rows.stop - rows.start
        assumed_FC = self.places_A.new_zeros(len(self.fields), count, dtype=self.dtype)
        for name in ("logprobs_T", "support_logprobs_T"):
            if name in self.fields:
                row_C = assumed_FC[self.fields.index(name)]
                if self.expected_A is not None:
                    row_C.copy_(self.expected_A[rows])
                row_C += by * (1 + torch.arange(count, device=row_C.device) % 3) / 8
        if known is not None:
            slice_of(assumed_FC, rows, known).copy_(torch.stack([value_A[known] for value_A in self.values]))
        return assumed_FC

    def head_output(self) -> TokenLogprobs:
        """Outputs of all rows, as a loss gets them."""
        return full_where_empty(TokenLogprobs(**dict(zip(self.fields, self.values, strict=True))), self.untruncated_A)
