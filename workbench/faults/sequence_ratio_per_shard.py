"""A document that straddles cp ranks has a sequence ratio of its own on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from workbench.faults import Fault
from workbench.rollouts.batch import PADDING
from workbench.sharding.mesh import Axis


def _left_partial(partial: Tensor, axis: Axis) -> Tensor:
    return partial


def _broken(split_row: Callable) -> Callable:
    def split_document_sums(*args: object) -> object:
        local = split_row(*args)
        row = local.row
        documents_T = row.document_ids_T - PADDING
        lengths_T = torch.bincount(documents_T, weights=row.loss_mask_T.double())[documents_T].clamp_min(1)
        return replace(local, row=replace(row, lengths_T=lengths_T), sums=replace(local.sums, complete=_left_partial))

    return split_document_sums


FAULT = Fault(
    family="B",
    what="sums and lengths of a document are taken over the tokens that a context-parallel rank holds of it",
    origin="ServiceNow/Fast-LLM e0d8c4d4 (segment ids that are not the same on all ranks)",
    signature="a document that lies on one rank is right; one that straddles has as many ratios as ranks, so that "
    "other tokens are clipped; loss and gradient wrong by no constant, and right under a token-level loss",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 3}, "loss": {"name": "gspo"}},
    hidden_in={"layout": {"cp": 1}},
)
