"""Sums over the tokens of a document, passed to a loss as an object, because a document may straddle ranks.

A sequence-level loss needs one number per document. If every token of a row is local, `LocalSums` is enough;
`workbench.reduction` has the version for documents that straddle context-parallel ranks, with the same interface.

Letters: T packed tokens | N documents.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.shapes import check_shapes


class DocumentSums(Protocol):
    """Sums over parts of a row, each broadcast to every token of the part.

    Tokens that do not count contribute exactly 0 (also if NaN) and get no gradient. On a document in which
    nothing counts the sum is 0.
    """

    def document(self, values_T: Tensor) -> Tensor:
        """Sum over the trained tokens of the token's own document, on all ranks.

        Shapes:   [T] -> [T], the same number on every token of a document.
        Backward: a trained token gets the sum of the cotangents of all tokens of its document, on all ranks.
        """

    def segment(self, values_T: Tensor) -> Tensor:
        """The same over each unbroken run of trained tokens (one turn of a conversation); 0 on other tokens."""

    def pair(self, values_T: Tensor) -> Tensor:
        """Sum over the chosen document of a preference pair minus the sum over the rejected one."""


class LocalSums:
    """Document sums of a row that is whole on this rank, in text order.

    Args:
        document_ids_T: [T] long, any labels; equal labels are one document.
        loss_mask_T: [T] bool, the token counts.
        group_ids_T: [T] long, for `pair`: the two documents of a pair share it.
        rewards_T: [T] for `pair`: the document with the greater reward is the chosen one.
    """

    def __init__(
        self,
        document_ids_T: Tensor,
        loss_mask_T: Tensor,
        *,
        group_ids_T: Tensor | None = None,
        rewards_T: Tensor | None = None,
    ) -> None:
        check_shapes(
            "LocalSums",
            document_ids_T=document_ids_T,
            loss_mask_T=loss_mask_T,
            group_ids_T=group_ids_T,
            rewards_T=rewards_T,
        )
        self.document_ids_T, self.loss_mask_T = document_ids_T, loss_mask_T
        self.group_ids_T, self.rewards_T = group_ids_T, rewards_T

    def document(self, values_T: Tensor) -> Tensor:
        """Sum over the trained tokens of the token's own document, on each of its tokens."""
        return self._sum_by(self._document_T, values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        """Sum over the token's unbroken run of trained tokens; 0 on other tokens."""
        return torch.where(self.loss_mask_T, self._sum_by(self._segment_T, values_T), 0.0)

    def pair(self, values_T: Tensor) -> Tensor:
        """Sum over the chosen document minus the sum over the rejected one, on each token of both.

        Raises:
            SpecError: no groups or no rewards, or a group of this row that is not a pair.
        """
        if self.group_ids_T is None or self.rewards_T is None:
            raise SpecError(
                "a loss on preference pairs",
                found="no group_ids or no rewards",
                rule="the two documents of a pair share a group, and the chosen one has the greater reward",
                fix="give the batch both",
            )
        return self._sum_by(self._pair_T, values_T * self._pair_signs_T.to(values_T.dtype))

    def _sum_by(self, part_T: Tensor, values_T: Tensor) -> Tensor:
        masked_T = torch.where(self.loss_mask_T, values_T, 0.0)
        # index_select, because the adjoint of indexing sorts and then adds a document's tokens one after another.
        return torch.zeros_like(masked_T).index_add(0, part_T, masked_T).index_select(0, part_T)

    @cached_property
    def _document_T(self) -> Tensor:
        return dense_labels(self.document_ids_T)

    @cached_property
    def _segment_T(self) -> Tensor:
        return dense_labels(segment_ids(self.document_ids_T, self.loss_mask_T))

    @cached_property
    def _pair_T(self) -> Tensor:
        return dense_labels(self.group_ids_T)

    @cached_property
    def _pair_signs_T(self) -> Tensor:
        return pair_signs(self.document_ids_T, self.group_ids_T, self.rewards_T, self.loss_mask_T)


def dense_labels(ids_T: Tensor) -> Tensor:
    """Number labels from 0 in sorted order, without a device synchronisation (`unique` needs one for its length).

    Shapes: [T] -> [T] long.

    Example:
        >>> dense_labels(torch.tensor([7, -1, 7, 3]))
        tensor([2, 0, 2, 1])
    """
    sorted_T, order_T = ids_T.sort()
    number_T = torch.zeros_like(order_T)
    number_T[1:] = (sorted_T[1:] != sorted_T[:-1]).cumsum(0)
    return torch.zeros_like(order_T).scatter(0, order_T, number_T)


def segment_ids(document_ids_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Number the unbroken runs of trained tokens of a whole row in text order; -1 outside them.

    Shapes: [T], [T] bool -> [T] long, counted from 0.
    """
    starts_T = loss_mask_T.clone()
    starts_T[1:] &= ~loss_mask_T[:-1] | (document_ids_T[1:] != document_ids_T[:-1])
    return torch.where(loss_mask_T, starts_T.long().cumsum(0) - 1, -1)


def pair_signs(document_ids_T: Tensor, group_ids_T: Tensor, rewards_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """Sign of every token of a whole row: +1 in the chosen document of its pair, -1 in the rejected one.

    Shapes: [T] each -> [T] of the rewards' dtype; 0 on documents in which nothing counts.
    Raises: SpecError: a group that is not two documents in this row, or whose rewards are equal.
    """
    signs_T = torch.zeros_like(rewards_T)
    for group in group_ids_T[loss_mask_T].unique().tolist():
        members = document_ids_T[loss_mask_T & (group_ids_T == group)].unique().tolist()
        rewards = [float(rewards_T[loss_mask_T & (document_ids_T == member)][0]) for member in members]
        if len(members) != 2 or rewards[0] == rewards[1]:
            raise SpecError(
                f"a preference pair from group {group}",
                found=f"{len(members)} document(s) with rewards {rewards}",
                rule="a pair is two trained documents of one row, with different rewards",
                fix="keep two completions per prompt, put both into one row, and drop ties",
            )
        for member, reward in zip(members, rewards, strict=True):
            signs_T[document_ids_T == member] = 1.0 if reward == max(rewards) else -1.0
    return signs_T


def document_totals(values_T: Tensor, loss_mask_T: Tensor, document_ids_T: Tensor, documents: int) -> Tensor:
    """Sums of a whole row, one per document, not broadcast to tokens.

    Shapes:   [T] each -> [N]; 0 for a document in which nothing counts.
    Backward: a trained token gets the cotangent of its document.
    """
    masked_T = torch.where(loss_mask_T, values_T, 0.0)
    return masked_T.new_zeros(documents).index_add(0, torch.where(loss_mask_T, document_ids_T, 0), masked_T)


def mean_of_document_means(values_T: Tensor, loss_mask_T: Tensor, document_ids_T: Tensor, documents: int) -> Tensor:
    """Mean over documents of their token means, undefined if a document has no trained token.

    Shapes:   [T] each -> scalar; NaN if nothing counts in some document, and so is the gradient of that document's
              tokens. A loss takes weights instead (`workbench.reduction.weights`), in which such a document counts as 0
              or not at all.
    Backward: 1 / (documents * length) on each trained token.
    Source:   masked_mean(per_seq=True) of NousResearch/torchtitan.
    """
    counts_T = loss_mask_T.to(values_T.dtype)
    masked_T = torch.where(loss_mask_T, values_T, values_T.nan_to_num()) * counts_T
    sums_N = values_T.new_zeros(documents).index_add(0, document_ids_T, masked_T)
    return (sums_N / counts_T.new_zeros(documents).index_add(0, document_ids_T, counts_T)).mean()
