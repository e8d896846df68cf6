"""Sums over the tokens of a document, passed to a loss as an object, because a document may straddle ranks.

    s_d = sum over ranks of the sum over the rank's trained tokens t of d of x_t        read back on every token of d

A rank adds up its own tokens of every document; a collective that is handed in completes the sums. Every rank continues
with *its own* tokens only, so the cotangents of a sum differ between ranks, and the collective's adjoint has to add
them up (`workbench.sharding.collectives.sum_sum`): with the identity a document spread evenly gets 1 / cp of them.

Letters: T packed tokens of a row | t tokens of this rank | C some of them | N documents, segments or pairs of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.errors import SpecError
from workbench.rollouts.places import places_of_each
from workbench.rollouts.targets import TrainingRow
from workbench.shapes import check_shapes


class Ranks(Protocol):
    """Ranks that share documents, such as an axis of a mesh."""

    @property
    def size(self) -> int:
        """Their number."""
        ...


class _OneRank:
    size = 1


ONE_RANK = _OneRank()


def _complete(whole: Tensor, axis: Any) -> Tensor:
    """Sums of one rank are complete."""
    return whole


@dataclass(frozen=True, eq=False)
class DocumentSums:
    """Sums over parts of a row, each read back on every token of the part.

    Tokens that do not count contribute exactly 0 (also if NaN) and get no gradient. On a part in which nothing counts
    the sum is 0.

    Collectives: one forward for each call and one backward for each call whose values carry a gradient, of a vector
    with one entry per document (segment, group) of the row, in the order of the calls; none on one rank. Every rank of
    the axis makes the same calls, also one without a token of any document.

    Attributes:
        document_ids_T: long, of the whole row; any labels, equal labels are one document.
        loss_mask_T: bool, the token counts.
        group_ids_T: long, for `pair`: the two documents of a pair share it.
        rewards_T: for `pair`: the document with the greater reward is the chosen one.
        positions_t: positions in the row of the tokens that values have entries for, in their order; None: all.
        axis: the ranks that share the row.
        complete: partial sums [..., N] and the axis -> sums over its ranks. On several ranks anything except `sum_sum`
            is a known bug.
        num_documents: N, if the tokens are those of one rank and the rest of the row is unknown; document ids then
            count from 0 to N - 1 over all ranks, and turns and pairs are not available.
        instead: name of a sum and values -> the sum, instead of computing it: recorded or replayed by a fused pass.
    """

    document_ids_T: Tensor
    loss_mask_T: Tensor
    group_ids_T: Tensor | None = None
    rewards_T: Tensor | None = None
    positions_t: Tensor | None = None
    axis: Ranks = ONE_RANK
    complete: Callable[[Tensor, Any], Tensor] = _complete
    num_documents: int | None = None
    instead: Callable[[str, Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        names = ("document_ids_T", "loss_mask_T", "group_ids_T", "rewards_T")
        check_shapes("DocumentSums", **{name: getattr(self, name) for name in names})

    @classmethod
    def of_row(cls, row: TrainingRow, positions_t: Tensor | None = None, **shared: Any) -> DocumentSums:
        """Return the sums of a whole row, before the split, for the tokens at some places of it.

        ``shared`` is ``axis`` and ``complete``, if ranks share the row.
        """
        return cls(row.document_ids_T, row.loss_mask_T, row.group_ids_T, row.rewards_T, positions_t, **shared)

    def document(self, values_t: Tensor) -> Tensor:
        """Sum over the trained tokens of the token's own document, on all ranks.

        Shapes:   [t] -> [t], the same number on every token of a document; at least float32.
        Backward: a trained token gets the sum of the cotangents of all tokens of its document, on all ranks.
        """
        return self._sum("document", values_t)

    def segment(self, values_t: Tensor) -> Tensor:
        """The same over each unbroken run of trained tokens (one turn of a conversation); 0 on other tokens."""
        return self._sum("segment", values_t)

    def pair(self, values_t: Tensor) -> Tensor:
        """Sum over the chosen document of a preference pair minus the sum over the rejected one.

        Raises:
            SpecError: no groups or no rewards, or a group of this row that is not a pair.
        """
        return self._sum("pair", values_t)

    def totals(self, *values_t: Tensor) -> Tensor:
        """Document sums of several values, not broadcast to tokens: one collective, and one in backward.

        Shapes: [t] each -> [values, N].
        """
        return self._totals(self._part("document"), *values_t)

    def on_tokens(self, of_documents_N: Tensor) -> Tensor:
        """[t] the number of each token's document."""
        return of_documents_N.index_select(0, self._part("document").ids_T)

    def at(self, places_C: Tensor) -> DocumentSums:
        """Return the same sums over and for some tokens only, by their indices among this rank's tokens."""
        positions_t = places_C if self.positions_t is None else self.positions_t[places_C.to(self.positions_t.device)]
        subset = replace(self, positions_t=positions_t)
        subset.__dict__["_row_parts"] = self._row_parts  # of the whole row: computed once
        return subset

    def _sum(self, kind: str, values_t: Tensor) -> Tensor:
        if self.instead is not None:
            return self.instead(kind, values_t)
        if kind != "document" and self.num_documents is not None:
            raise SpecError(
                f"a loss on {_NAMES[kind]}, from one rank's tokens",
                rule="only sums over whole documents are available here",
                fix="use workbench.train.step, which sees whole rows before they are split",
            )
        part = self._part(kind)
        if part.signs_T is not None:
            values_t = values_t * part.signs_T.to(values_t.dtype)
        # index_select, because the adjoint of indexing sorts and then adds a document's tokens one after another.
        sums_t = self._totals(part, values_t)[0].index_select(0, part.ids_T)
        return torch.where(self._mask_t, sums_t, 0.0) if kind == "segment" else sums_t

    def _totals(self, part: _Part, *values: Tensor) -> Tensor:
        partial = []
        for values_t in values:
            masked_t = torch.where(self._mask_t, values_t.to(torch.promote_types(values_t.dtype, torch.float32)), 0.0)
            partial.append(masked_t.new_zeros(part.count).index_add(0, part.ids_T, masked_t))
        return self.complete(torch.stack(partial), self.axis)

    def _part(self, kind: str) -> _Part:
        if kind not in self._row_parts:
            self._row_parts[kind] = self._row_part(kind)
        if kind not in self._parts:
            self._parts[kind] = self._local_part(self._row_parts[kind])
        return self._parts[kind]

    def _row_part(self, kind: str) -> _Part:
        if self.num_documents is not None:
            return _Part(self.document_ids_T, self.num_documents)
        labels_T, signs_T = self.document_ids_T, None
        if kind == "segment":
            labels_T = segment_ids(self.document_ids_T, self.loss_mask_T)
        elif kind == "pair":
            signs_T = pair_signs(self.document_ids_T, self.group_ids_T, self.rewards_T, self.loss_mask_T)
            assert self.group_ids_T is not None, "`pair_signs` requires it"
            labels_T = self.group_ids_T
        numbers_T = dense_labels(labels_T)
        # A collective adds vectors of this length; on one rank the tokens bound it, and no device has to be waited for.
        return _Part(numbers_T, len(numbers_T) if self.axis.size == 1 else int(numbers_T.max()) + 1, signs_T)

    def _local_part(self, part: _Part) -> _Part:
        return _Part(self._local(part.ids_T), part.count, None if part.signs_T is None else self._local(part.signs_T))

    def _local(self, values_T: Tensor) -> Tensor:
        if self.positions_t is None:
            return values_T
        return values_T.index_select(0, self.positions_t.to(values_T.device))

    @cached_property
    def _mask_t(self) -> Tensor:
        return self._local(self.loss_mask_T)

    @cached_property
    def _parts(self) -> dict[str, _Part]:
        return {}

    @cached_property
    def _row_parts(self) -> dict[str, _Part]:
        return {}


@dataclass(frozen=True)
class _Part:
    """Part of the row that each token belongs to, the number of parts of the whole row, and the signs of pairs."""

    ids_T: Tensor
    count: int
    signs_T: Tensor | None = None


_NAMES = {"segment": "turns of a conversation", "pair": "preference pairs"}


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


def pair_signs(
    document_ids_T: Tensor, group_ids_T: Tensor | None, rewards_T: Tensor | None, loss_mask_T: Tensor
) -> Tensor:
    """Sign of every token of a whole row: +1 in the chosen document of its pair, -1 in the rejected one.

    Shapes: [T] each -> [T] of the rewards' dtype; 0 on documents in which nothing counts.
    Raises: SpecError: no groups or no rewards; a group that is not two documents in this row, or whose rewards are
            equal.
    """
    if group_ids_T is None or rewards_T is None:
        raise SpecError(
            "a loss on preference pairs",
            found="no group_ids or no rewards",
            rule="the two documents of a pair share a group, and the chosen one has the greater reward",
            fix="give the batch both",
        )
    signs_T = torch.zeros_like(rewards_T)
    trained = loss_mask_T.nonzero()[:, 0]
    of_documents = places_of_each(document_ids_T)
    for group, at in places_of_each(group_ids_T[trained]).items():
        of_group = trained[at]
        first_of = {member: of_group[places[0]] for member, places in places_of_each(document_ids_T[of_group]).items()}
        members, rewards = [*first_of], [float(rewards_T[first]) for first in first_of.values()]
        if len(members) != 2 or rewards[0] == rewards[1]:
            raise SpecError(
                f"a preference pair from group {group}",
                found=f"{len(members)} document(s) with rewards {rewards}",
                rule="a pair is two trained documents of one row, with different rewards",
                fix="keep two completions per prompt, put both into one row, and drop ties",
            )
        for member, reward in zip(members, rewards, strict=True):
            signs_T[of_documents[member]] = 1.0 if reward == max(rewards) else -1.0
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
