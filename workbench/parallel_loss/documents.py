"""Document ids of a rank's tokens, and sums over documents whose tokens lie on several cp ranks.

Letters: t tokens of this rank, in any shape (unpacked rows [b, t], or a packed row [t]) | N documents of the row or
rows, the same number on all ranks that share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.errors import ShapeError, SpecError
from workbench.sharding.collectives import all_max, sum_sum
from workbench.sharding.mesh import Axis


@dataclass(frozen=True)
class Documents:
    """The documents of this rank's tokens.

    Attributes:
        ids: in the shape of the tokens, int64, 0 to count - 1.
        count: N, of the whole row or rows; the same on every rank of the axis.
        axis: the ranks that share the row or rows.
    """

    ids: Tensor
    count: int
    axis: Axis

    @classmethod
    def of(cls, mask: Tensor, ids: Tensor | None, count: int | None, axis: Axis) -> Documents:
        """Build from ids; without ids each row of [b, t] is a document, and a row of [t] is one.

        Collective over the axis (a maximum) if ids come without a count.

        Args:
            mask: bool, the token counts; one that does not may have an id below 0 (no document).
            ids: in the shape of the mask, or None.
            count: number of documents of the whole row or rows, or None.
            axis: the ranks that share them.

        Raises:
            ShapeError: ids of another shape, not integers, not below the count, or below 0 on a token that counts.
        """
        if ids is None:
            rows = mask.shape[0] if mask.dim() > 1 else 1
            own = torch.arange(rows, device=mask.device)
            return cls(own.view(-1, *[1] * (mask.dim() - 1)).expand(mask.shape), rows, axis)
        if ids.shape != mask.shape or ids.dtype.is_floating_point or ids.dtype is torch.bool:
            raise ShapeError(
                "documents",
                found=f"{ids.dtype} of shape {tuple(ids.shape)}",
                rule=f"an integer for each token, of shape {tuple(mask.shape)}",
                fix="give the id of every token's document",
            )
        if bool((mask & (ids < 0)).any()):
            raise ShapeError(
                "documents",
                found="an id below 0 on a token that counts",
                rule="a token that counts has a document; below 0 is padding",
                fix="leave padding out of the mask, or number its document",
            )
        highest = ids.max() if ids.numel() else ids.new_tensor(-1)
        if count is None:
            count = max(int(all_max(highest, axis)) + 1, 1)
        elif int(highest) >= count:
            raise ShapeError(
                f"num_documents = {count}",
                found=f"a document with the id {int(highest)}",
                rule="ids count from 0 through all documents of the row, on all of its ranks",
                fix="give the number of documents of the whole row",
            )
        return cls(ids.long().clamp_min(0), count, axis)

    def totals(self, *values: Tensor, mask: Tensor) -> Tensor:
        """Sum over each document's counted tokens, on all ranks. One collective over the axis, and one in backward.

        Shapes:   each of the values in the shape of the tokens -> [values, N]; at least float32.
        Backward: all-reduce sum of the ranks' gradients of a sum, then to each token that counts (`sum_sum`).
        """
        ids = self.ids.reshape(-1)
        partial = []
        for value in values:
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            masked = torch.where(mask, wide, 0.0).reshape(-1)
            partial.append(masked.new_zeros(self.count).index_add(0, ids, masked))
        return sum_sum(torch.stack(partial), self.axis)

    def on_tokens(self, of_documents_N: Tensor) -> Tensor:
        """Broadcast per-document values to tokens, in the shape of the tokens."""
        return of_documents_N.index_select(0, self.ids.reshape(-1)).view(self.ids.shape)


@dataclass(frozen=True)
class SumsOverRanks:
    """`workbench.losses.document_sums.DocumentSums` for documents that span ranks.

    Attributes:
        documents: of the flat tokens, [t].
        mask_t: [t] bool, the token counts.
    """

    documents: Documents
    mask_t: Tensor

    def document(self, values_T: Tensor) -> Tensor:
        """Sum over the counted tokens of each token's document, on all ranks; see `Documents.totals`."""
        return self.documents.on_tokens(self.documents.totals(values_T, mask=self.mask_t)[0])

    def segment(self, values_T: Tensor) -> Tensor:
        """Raise: a shard does not show where turns begin."""
        raise _needs_whole_rows("turns of a conversation")

    def pair(self, values_T: Tensor) -> Tensor:
        """Raise: a shard does not show which documents form a pair."""
        raise _needs_whole_rows("preference pairs")


def _needs_whole_rows(what: str) -> SpecError:
    return SpecError(
        f"a loss on {what}, from one rank's tokens",
        rule="only sums over whole documents are available here",
        fix="use workbench.train.step, which sees whole rows before they are split",
    )
