"""Positions of a shard go on from its first token, though its second half lies further down the document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from workbench.faults import Fault


def _broken(split_row: Callable) -> Callable:
    def split_and_count_on(*args: object) -> object:
        local = split_row(*args)
        row = local.row
        _, stretches_T, counts = torch.unique_consecutive(row.document_ids_T, return_inverse=True, return_counts=True)
        begins_T = (counts.cumsum(0) - counts)[stretches_T]
        places_T = torch.arange(len(stretches_T), device=stretches_T.device)
        return replace(local, row=replace(row, positions_T=row.positions_T[begins_T] + places_T - begins_T))

    return split_and_count_on


FAULT = Fault(
    family="S",
    what="rotary positions of a zigzag shard are counted on from its head, not taken up again at its tail",
    origin="verl-project/verl#6267",
    signature="heads of documents right; tails, which a rank holds from further down, meet keys at wrong distances: "
    "log-probabilities wrong there, and with them loss and gradients; nothing where shards are stretches",
    seam="split_row",
    broken=_broken,
    shows_in={"layout": {"cp": 2, "order": "document_zigzag"}},
    hidden_in={"layout": {"order": "contiguous"}},
    detected_by="tests/faults/test_unseen.py::test_positions_that_count_on_spare_heads_of_documents",
)
