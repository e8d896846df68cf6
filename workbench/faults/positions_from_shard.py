"""A rank counts the positions of its tokens itself, from the first one that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault


def _broken(split_row: Callable) -> Callable:
    def split_and_count(*args: object) -> object:
        local = split_row(*args)
        row = local.row
        _, stretches_T, counts = torch.unique_consecutive(row.document_ids_T, return_inverse=True, return_counts=True)
        places_T = torch.arange(len(stretches_T), device=stretches_T.device)
        return replace(local, row=replace(row, positions_T=places_T - (counts.cumsum(0) - counts)[stretches_T]))

    return split_and_count


FAULT = Fault(
    family="S",
    what="rotary positions are made again on each shard, from the beginnings of documents that the shard can see",
    origin="no single report: position_ids that a model counts itself where a shard brings none",
    signature="documents that lie on one rank are right; of those that straddle, the first part is right and the tail "
    "meets keys at wrong distances: log-probabilities, loss and gradients wrong from there on",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 2}},
    hidden_in={"layout": {"cp": 1}},
)
