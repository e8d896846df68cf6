"""Sums over the tokens of a document when its tokens lie on several context-parallel ranks.

Each rank adds up its own tokens of every document of the row; one all-reduce of that [N]-vector completes the sums,
and each token takes its document's. Every rank then continues with *its own* tokens only, so the cotangents of a sum
differ between ranks, and the adjoint adds them up: `sharding.collectives.sum_sum`. With the identity instead a rank's
tokens get the cotangents of that rank only (1 / cp of the gradient where a document is spread evenly).

Collectives: one forward for each call and one backward for each call whose values carry a gradient, of a vector with
one entry per document (segment, group) of the row, in the order of the calls. Every rank of the axis makes the same
calls, also one without a token of any document.

Letters: T packed tokens | N documents, segments or pairs of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.losses.document_sums import pair_signs, segment_ids
from workbench.rollouts.targets import TrainingRow
from workbench.sharding.collectives import sum_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class ShardedSums:
    """`workbench.losses.document_sums.DocumentSums` of a row that ranks of an axis share.

    Args:
        row: the whole row, before the split, the same on every rank: it has the document of each token.
        positions_T: [t] positions in the row of this rank's tokens, in its order.
        axis: the axis whose ranks share the row.
        complete: completes partial sums; anything except `sum_sum` is a known bug, used in tests.
    """

    row: TrainingRow
    positions_T: Tensor
    axis: Axis
    complete: Callable[[Tensor, Axis], Tensor] = sum_sum

    def document(self, values_T: Tensor) -> Tensor:
        """Sum over the trained tokens of the token's own document, on all ranks.

        Shapes:   [t] -> [t], the same number on every token of a document.
        Backward: all-reduce sum of the cotangents of all tokens of the document, then to each trained token.
        """
        return self._sum_by(self._documents, values_T)

    def segment(self, values_T: Tensor) -> Tensor:
        """The same over each unbroken run of trained tokens (one turn of a conversation); 0 on other tokens."""
        return torch.where(self._loss_mask_T, self._sum_by(self._segments, values_T), 0.0)

    def pair(self, values_T: Tensor) -> Tensor:
        """Sum over the chosen document of a preference pair minus the sum over the rejected one.

        Raises:
            SpecError: no groups or no rewards, or a group of this row that is not a pair.
        """
        return self._sum_by(self._pairs, values_T * self._pair_signs_T.to(values_T.dtype))

    def at(self, places_C: Tensor) -> ShardedSums:
        """The same sums, over and for some of this rank's tokens only.

        Args:
            places_C: [C] their indices among this rank's tokens.
        """
        subset = replace(self, positions_T=self.positions_T[places_C.to(self.positions_T.device)])
        subset.__dict__["_numbers"] = self._numbers  # of the whole row: computed once
        return subset

    def _sum_by(self, parts: _Parts, values_T: Tensor) -> Tensor:
        masked_T = torch.where(self._loss_mask_T, values_T, 0.0)
        partial_N = masked_T.new_zeros(parts.count).index_add(0, parts.ids_T, masked_T)
        return self.complete(partial_N, self.axis).index_select(0, parts.ids_T)

    @cached_property
    def _loss_mask_T(self) -> Tensor:
        return self._local(self.row.loss_mask_T)

    @cached_property
    def _numbers(self) -> _Numbers:
        return _Numbers(self.row)

    @cached_property
    def _documents(self) -> _Parts:
        return self._local_parts(self._numbers.documents)

    @cached_property
    def _segments(self) -> _Parts:
        return self._local_parts(self._numbers.segments)

    @cached_property
    def _pairs(self) -> _Parts:
        return self._local_parts(self._numbers.pairs)

    @cached_property
    def _pair_signs_T(self) -> Tensor:
        return self._local(self._numbers.pair_signs_T)

    def _local_parts(self, parts: _Parts) -> _Parts:
        return _Parts(self._local(parts.ids_T), parts.count)

    def _local(self, values_T: Tensor) -> Tensor:
        return values_T.index_select(0, self.positions_T.to(values_T.device))


@dataclass(frozen=True)
class _Parts:
    """Part of the row that each token belongs to, and the number of parts of the whole row."""

    ids_T: Tensor
    count: int

    @classmethod
    def of(cls, labels_T: Tensor) -> _Parts:
        numbers_T = labels_T.unique(return_inverse=True)[1]
        return cls(numbers_T, int(numbers_T.max()) + 1)


@dataclass(frozen=True)
class _Numbers:
    """The parts of a whole row, each computed on first use."""

    row: TrainingRow

    @cached_property
    def documents(self) -> _Parts:
        return _Parts.of(self.row.document_ids_T)

    @cached_property
    def segments(self) -> _Parts:
        return _Parts.of(segment_ids(self.row.document_ids_T, self.row.loss_mask_T))

    @cached_property
    def pairs(self) -> _Parts:
        return _Parts.of(self.row.group_ids_T)

    @cached_property
    def pair_signs_T(self) -> Tensor:
        return signs_of_pairs(self.row)


def signs_of_pairs(row: TrainingRow) -> Tensor:
    """[T] +1 on the chosen and -1 on the rejected document of each preference pair of a whole row.

    Raises:
        SpecError: no groups or no rewards, or a group of this row that is not a pair.
    """
    if row.group_ids_T is None or row.rewards_T is None:
        raise SpecError(
            "a loss on preference pairs",
            found="no group_ids or no rewards",
            rule="the two documents of a pair share a group, and the chosen one has the greater reward",
            fix="give the batch both",
        )
    return pair_signs(row.document_ids_T, row.group_ids_T, row.rewards_T, row.loss_mask_T)
