"""Coefficients of a chunk while the rest of its document is not known, which are right up to one factor.

Letters: C rows of a chunk | F requested fields of `TokenLogprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.policy.logprobs.coefficients import are_near, common_factor, finite_or_zero, on_any_rank, slice_of
from workbench.policy.logprobs.row_outputs import RowOutputs
from workbench.sharding.mesh import Axis

Rest = Literal["nothing", "data", "factor", "more"]
"""Effect of the rest of a document on the coefficients of a chunk: none; by its presence but not its log-probabilities
(its data count); one common factor; more than that."""


@dataclass
class Trials:
    """Trial coefficients of one pass; ``axis``: the tp ranks that decide together, None if there is one."""

    outputs: RowOutputs
    axis: Axis | None

    def __post_init__(self) -> None:
        self._rest: Rest | None = None
        self._first_FC: Tensor | None = None
        self._free_FA: Tensor | None = None

    def rest_effect(self, rows: slice, part: slice) -> Rest:
        """Effect of a document's other rows on the coefficients of one of its chunks.

        Measured by shifting the other rows' log-probabilities down and up. Determined once per call, from the first
        document that is longer than a chunk and has nonzero coefficients; synchronizes with the device.
        """
        if self._rest is None:
            outputs = self.outputs
            own_FC = outputs.loss(part)[1]
            down_FC, up_FC = (
                slice_of(outputs.loss(rows, outputs.assumed(rows, part, by))[1], rows, part) for by in (-1, 1)
            )
            gone = (down_FC == 0).all()
            flags = torch.stack(
                [
                    torch.stack([own_FC, down_FC, up_FC]).any(),
                    ~are_near(own_FC, down_FC),
                    ~are_near(down_FC, up_FC) | gone,
                    ~are_near(up_FC, common_factor(up_FC, down_FC) * down_FC) & ~gone,
                ]
            )
            if outputs.expected_A is not None:  # queued before the synchronization: it is probably needed next
                self._first_FC = self._of(rows, part)
            nonzero, seen, moved, more = on_any_rank(flags, self.axis).tolist()
            if not nonzero:  # a document without advantages; or, without expectations of the rest, a clip
                self._first_FC = None
                return "factor" if outputs.expected_A is None else "nothing"
            self._rest = "more" if moved and more else "factor" if moved else "data" if seen else "nothing"
            if self._rest != "factor":
                self._first_FC = None
        return self._rest

    def take(self, rows: slice, part: slice) -> Tensor:
        """Trial coefficients of a chunk of a document; [F, C].

        With expectations: the coefficients under these, but 0 where the chunk shows that a row is clipped. Without:
        the coefficients of the chunk alone, normalized to be comparable between chunks. The document's factor may have
        any value, including 0 (a clip): only the shape matters.
        """
        first_FC, self._first_FC = self._first_FC, None
        return self._of(rows, part) if first_FC is None else first_FC

    def _of(self, rows: slice, part: slice) -> Tensor:
        outputs = self.outputs
        if self._rest == "data":
            return finite_or_zero(slice_of(outputs.loss(rows, outputs.assumed(rows, part))[1], rows, part))
        if outputs.expected_A is None:
            own_FC = outputs.loss(part)[1]
            pivot, even_FC = own_FC.take(own_FC.abs().argmax()), torch.zeros_like(own_FC)
            even_FC[0] = 1
            return finite_or_zero(torch.where(pivot == 0, even_FC, own_FC / pivot))
        if self._free_FA is None:
            self._free_FA = outputs.loss(outputs.everything, outputs.assumed(outputs.everything))[1]
        open_FC = slice_of(outputs.loss(rows, outputs.assumed(rows, part))[1], rows, part) != 0
        return finite_or_zero(torch.where(open_FC | ~open_FC.any(), self._free_FA[:, part], 0.0))
